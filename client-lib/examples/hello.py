"""The same ten lines in each language: hello.rs, hello.c, hello.cpp, hello.py.

pip install ./client-lib/python && LAPIS_SOCKET=/tmp/lapis.sock python hello.py
"""

import lapis

with lapis.Client() as client:
    memory = client.allocate(64 << 20)
    with memory.map(0, 14, "write") as mapping:
        mapping[0].copy_from(b"hello, tiers!\n")
    client.advise((memory, 0, 14), "dont_need")
    with memory.map(0, 14) as mapping:
        print(mapping[0].tobytes().decode(), end="")
