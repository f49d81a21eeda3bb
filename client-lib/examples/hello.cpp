// The same ten lines in each language: hello.rs, hello.c, hello.cpp, hello.py.
//
// c++ -std=c++17 hello.cpp $(pkg-config --cflags --libs lapis) && LAPIS_SOCKET=/tmp/lapis.sock ./a.out
#include <cstdio>
#include <lapis.hpp>
#include <string>

int main() {
    try {
        lapis::Client client;
        lapis::Allocation memory = client.allocate(64 << 20);
        lapis::Mapping mapping = client.map(memory.range(0, 14), LAPIS_WRITE);
        mapping.copy_from_host(0, 0, "hello, tiers!\n", 14);
        mapping.unmap();
        client.advise(memory.range(0, 14), LAPIS_ADVICE_DONT_NEED);
        mapping = client.map(memory.range(0, 14), LAPIS_READ);
        std::string text(14, '\0');
        mapping.copy_to_host(0, 0, text.data(), text.size());
        std::fputs(text.c_str(), stdout);
    } catch (const lapis::Error& error) {
        std::fprintf(stderr, "error %d: %s\n", error.code(), error.what());
        return 1;
    }
}
