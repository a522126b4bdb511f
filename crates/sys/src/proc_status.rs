//! Figures of /proc on this process and this boot.

use std::io;

/// Figures of `/proc/self/status` and `/proc/self/maps`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Resident anonymous memory (`RssAnon`), in bytes.
    pub rss_anon: u64,
    /// Total size of all shared mappings (`rw-s` and `r--s` in `maps`), in bytes.
    pub shared_mapped: u64,
}

/// Number that changes at each boot of the kernel (random(4), `boot_id`). `None` if it can't be read.
pub fn boot_mark() -> Option<u64> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = id
        .chars()
        .filter(char::is_ascii_hexdigit)
        .take(16)
        .collect();
    u64::from_str_radix(&digits, 16).ok()
}

/// Reads the figures of process `pid`; `None` means this process.
pub fn memory(pid: Option<u32>) -> io::Result<ProcessMemory> {
    let dir = pid.map_or("/proc/self".to_owned(), |p| format!("/proc/{p}"));
    let status = std::fs::read_to_string(format!("{dir}/status"))?;
    let maps = std::fs::read_to_string(format!("{dir}/maps"))?;
    Ok(ProcessMemory {
        rss_anon: rss_anon(&status),
        shared_mapped: shared_mapped(&maps),
    })
}

/// The kernel's letter for the state of a thread of this process (`proc_pid_stat(5)`): `R` runs or waits for a CPU,
/// `S` and `D` sleep. `None` if there is no such thread, or no `/proc`.
pub fn thread_state(tid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{tid}/stat")).ok()?;
    // The name before the state may contain any character, including parentheses.
    stat.rsplit_once(") ")?.1.chars().next()
}

fn rss_anon(status: &str) -> u64 {
    let line = status
        .lines()
        .find_map(|l| l.strip_prefix("RssAnon:"))
        .unwrap_or("");
    line.trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .unwrap_or(0)
        * 1024
}

fn shared_mapped(maps: &str) -> u64 {
    maps.lines()
        .filter_map(|l| {
            let (range, rest) = l.split_once(' ')?;
            if rest.as_bytes().get(3) != Some(&b's') {
                return None;
            }
            let (a, b) = range.split_once('-')?;
            u64::from_str_radix(b, 16)
                .ok()?
                .checked_sub(u64::from_str_radix(a, 16).ok()?)
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_states_distinguish_running_and_sleeping() {
        let mine = rustix::thread::gettid().as_raw_nonzero().get();
        assert_eq!(thread_state(mine), Some('R'));
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            ended.recv().unwrap();
        });
        let tid = told.recv().unwrap();
        let start = std::time::Instant::now();
        while thread_state(tid) != Some('S') {
            assert!(start.elapsed().as_secs() < 60, "it never sleeps");
            std::thread::yield_now();
        }
        end.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(thread_state(i32::MAX), None);
    }

    #[test]
    fn figures_are_parsed_from_the_kernels_lines() {
        assert_eq!(
            rss_anon("VmRSS:\t 1 kB\nRssAnon:\t     136 kB\n"),
            136 * 1024
        );
        let maps =
            "1000-3000 rw-s 0 00:01 5 /memfd:x\n3000-4000 rw-p 0 0 0\n5000-6000 r--s 0 0 0\n";
        assert_eq!(shared_mapped(maps), 0x3000);
        assert!(memory(None).unwrap().rss_anon > 0);
    }
}
