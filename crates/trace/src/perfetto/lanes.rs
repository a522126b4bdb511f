//! Tracks for requests that overlap: on one track, slices must nest.

use std::collections::BTreeMap;

/// Lanes of one queue. On none of them two requests overlap.
#[derive(Debug, Default)]
pub struct Lanes {
    /// Lanes by the end of their last request, in nanoseconds, and their number.
    free: BTreeMap<(u64, u32), ()>,
    count: u32,
}

impl Lanes {
    /// The lane for a request from `begin_ns` to `end_ns`: the one that was idle for the shortest time, or a new one. Call it in the order of ends.
    pub fn take(&mut self, begin_ns: u64, end_ns: u64) -> u32 {
        let idle = self.free.range(..=(begin_ns, u32::MAX)).next_back();
        let lane = match idle.map(|(key, ())| *key) {
            Some(key) => {
                self.free.remove(&key);
                key.1
            }
            None => {
                self.count += 1;
                self.count - 1
            }
        };
        self.free.insert((end_ns, lane), ());
        lane
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_a_lane_follow_one_another_and_lanes_are_few() {
        let mut random = fastrand::Rng::with_seed(pvblk_testing::seed());
        let mut lanes = Lanes::default();
        let mut requests: Vec<(u64, u64)> = (0..5000)
            .map(|_| {
                let begin = random.u64(0..100_000);
                (begin, begin + random.u64(0..300))
            })
            .collect();
        requests.sort_by_key(|r| r.1);
        let mut ends: Vec<u64> = Vec::new();
        for (begin, end) in &requests {
            let lane = lanes.take(*begin, *end) as usize;
            ends.resize(ends.len().max(lane + 1), 0);
            assert!(
                ends[lane] <= *begin,
                "lane {lane} is busy until {}",
                ends[lane]
            );
            ends[lane] = *end;
        }
        // The most requests in flight at a time; those that end when others begin aren't in flight together.
        let mut moments: Vec<(u64, i32)> = requests
            .iter()
            .filter(|(begin, end)| begin < end)
            .flat_map(|(begin, end)| [(*begin, 1), (*end, -1)])
            .collect();
        moments.sort_unstable();
        let (mut now, mut most) = (0, 0);
        for (_, step) in moments {
            now += step;
            most = most.max(now);
        }
        assert!(
            ends.len() as i32 <= most + 1,
            "{} lanes for {most}",
            ends.len()
        );
    }
}
