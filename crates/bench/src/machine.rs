//! The machine of a measurement.

use serde::Serialize;

/// The machine, as far as a reader of results needs it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Machine {
    /// Model of the CPU.
    pub cpu: String,
    /// CPUs that the process may use.
    pub cpus: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Memory in MiB.
    pub memory_mib: u64,
}

impl Machine {
    /// The machine that this program runs on.
    pub fn here() -> Machine {
        let read = |p: &str| std::fs::read_to_string(p).unwrap_or_default();
        let field = |text: &str, name: &str| {
            text.lines()
                .find(|l| l.starts_with(name))
                .and_then(|l| l.split(':').nth(1))
                .map(|s| s.trim().to_owned())
                .unwrap_or_default()
        };
        let kib = field(&read("/proc/meminfo"), "MemTotal");
        let kib = kib.split(' ').next().and_then(|s| s.parse::<u64>().ok());
        Machine {
            cpu: field(&read("/proc/cpuinfo"), "model name"),
            cpus: pvblk_sys::cpu::allowed().len(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            memory_mib: kib.unwrap_or(0) / 1024,
        }
    }
}
