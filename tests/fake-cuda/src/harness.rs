//! For tests: where the shared library is, how a process gets it, and the controls, from outside of that process.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::gate::Gate;
use crate::ledger::{self, Ledger};

/// A machine with fake devices, in a directory of its own.
#[derive(Debug)]
pub struct FakeCuda {
    libraries: PathBuf,
    state: PathBuf,
}

impl FakeCuda {
    /// Sets the machine up in a directory that is there.
    ///
    /// # Errors
    /// When the directory can't be written to.
    ///
    /// # Panics
    /// When the shared library was not built: the test's package must depend on this one.
    pub fn new(directory: &Path) -> io::Result<Self> {
        let fake = Self::open(directory);
        std::fs::create_dir(&fake.libraries)?;
        ledger::shared_directory(&fake.state)?;
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::os::unix::fs::symlink(library(), fake.libraries.join(name))?;
        }
        Ok(fake)
    }

    /// The machine that was set up in a directory, perhaps by another process.
    #[must_use]
    pub fn open(directory: &Path) -> Self {
        Self { libraries: directory.join("lib"), state: directory.join("state") }
    }

    /// What a process must have in its environment.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, OsString); 2] {
        [
            ("LD_LIBRARY_PATH", self.libraries.clone().into()),
            ("FAKE_CUDA_DIR", self.state.clone().into()),
        ]
    }

    /// The library, as `libcuda.so.1`.
    #[must_use]
    pub fn library(&self) -> PathBuf {
        self.libraries.join("libcuda.so.1")
    }

    /// Stops the queues of a device, in every process.
    ///
    /// # Errors
    /// When the gate's file can't be made.
    pub fn pause(&self, device: u32) -> io::Result<()> {
        let directory = self.device(device);
        ledger::shared_directory(&directory)?;
        Gate::of_device(&directory).shut()
    }

    /// Lets the queues go on.
    ///
    /// # Errors
    /// When the gate's file can't be removed.
    pub fn resume(&self, device: u32) -> io::Result<()> {
        Gate::of_device(&self.device(device)).open()
    }

    /// Stops every call of the driver, in every process.
    ///
    /// # Errors
    /// When the gate's file can't be made.
    pub fn wedge(&self) -> io::Result<()> {
        Gate::of_calls(&self.state).shut()
    }

    /// Lets calls go on.
    ///
    /// # Errors
    /// When the gate's file can't be removed.
    pub fn unwedge(&self) -> io::Result<()> {
        Gate::of_calls(&self.state).open()
    }

    /// Sets the faults of every process, each as `SYMBOL:AFTER:CODE[:TIMES]`; none takes all away.
    ///
    /// # Errors
    /// When their file can't be written.
    pub fn set_faults(&self, faults: &[&str]) -> io::Result<()> {
        // Put in place whole: a process may look at any time.
        let partial = self.state.join("faults.new");
        let mut file = File::create(&partial)?;
        faults.iter().try_for_each(|fault| writeln!(file, "{fault}"))?;
        std::fs::rename(&partial, self.state.join("faults"))
    }

    /// Bytes of a device's memory that live processes hold.
    ///
    /// # Errors
    /// When the device's directory can't be read.
    pub fn memory_used(&self, device: u32) -> io::Result<u64> {
        let ledger = Ledger::open(self.device(device), 0)?;
        ledger.used().map_err(|code| io::Error::other(format!("{code:?}")))
    }

    /// Those of them that one process made, whoever holds them now.
    ///
    /// # Errors
    /// When the device's directory can't be read.
    pub fn memory_made_by(&self, device: u32, process: u32) -> io::Result<u64> {
        Ledger::open(self.device(device), 0)?.made_by(process)
    }

    fn device(&self, device: u32) -> PathBuf {
        self.state.join(format!("device-{device}"))
    }
}

/// The shared library that was built with the test that runs.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("a test has an executable");
    let mut directories = test.ancestors().skip(1).take(2);
    let found = directories.find_map(|directory| {
        let beside = ["deps/liblapis_fake_cuda.so", "liblapis_fake_cuda.so"];
        beside.iter().map(|name| directory.join(name)).find(|path| path.exists())
    });
    found.expect("the package of the test depends on lapis-fake-cuda, so its library is built")
}
