//! CPU time of a thread, as the kernel counts it.

use super::report::Usage;
use std::time::Duration;

/// The calling thread's figures since it began.
pub(super) fn of_this_thread() -> Usage {
    let mut usage = Usage::default();
    if let Ok(stat) = std::fs::read_to_string("/proc/thread-self/stat") {
        // Fields after the name, which is in parentheses: proc_pid_stat(5).
        let rest = stat.rsplit_once(')').map_or("", |p| p.1);
        let fields: Vec<u64> = rest
            .split_whitespace()
            .map(|f| f.parse().unwrap_or(0))
            .collect();
        let field = |i: usize| fields.get(i).copied().unwrap_or(0);
        usage.minor_faults = field(7);
        usage.major_faults = field(9);
        usage.user_s = field(11) as f64 / 100.0; // USER_HZ is 100 on every Linux ABI
        usage.system_s = field(12) as f64 / 100.0;
    }
    if let Ok(status) = std::fs::read_to_string("/proc/thread-self/status") {
        let switches = status.lines().filter(|l| l.contains("ctxt_switches"));
        usage.switches = switches
            .filter_map(|l| l.split(':').nth(1)?.trim().parse::<u64>().ok())
            .sum();
    }
    usage
}

impl Usage {
    /// The difference to `before`, for an elapsed time of `wall`.
    pub(super) fn since(&self, before: &Usage, wall: Duration) -> Usage {
        Usage {
            user_s: self.user_s - before.user_s,
            system_s: self.system_s - before.system_s,
            switches: self.switches.saturating_sub(before.switches),
            major_faults: self.major_faults.saturating_sub(before.major_faults),
            minor_faults: self.minor_faults.saturating_sub(before.minor_faults),
            wall_s: wall.as_secs_f64(),
        }
    }
}
