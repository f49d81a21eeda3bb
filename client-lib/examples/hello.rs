//! The same ten lines in each language: hello.rs, hello.c, hello.cpp, hello.py.
//!
//! `cargo run -p lapis-client --example hello`, with `LAPIS_SOCKET` set to the daemon's socket.

use lapis::{Access, Client};

fn main() -> Result<(), lapis::Error> {
    let client = Client::connect_default()?;
    let memory = client.allocate(64 << 20)?;
    let mut mapping = memory.map(0..14, Access::Write)?;
    mapping.copy_from_host(0, 0, b"hello, tiers!\n")?;
    mapping.unmap()?;
    memory.advise(0..14, lapis::Advice::DontNeed)?;
    let mapping = memory.map(0..14, Access::Read)?;
    let mut text = [0; 14];
    mapping.copy_to_host(0, 0, &mut text)?;
    print!("{}", String::from_utf8_lossy(&text));
    Ok(())
}
