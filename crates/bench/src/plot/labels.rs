//! Places of labels at the ends of lines.

use super::text::LINE;

/// Moves labels apart that would touch: their middles, in pixels, in the order of `wanted`. They stay as near as they can, and between `top` and
/// `bottom` if there is room for all.
pub fn apart(wanted: &[i32], top: i32, bottom: i32) -> Vec<i32> {
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    order.sort_by_key(|n| wanted[*n]);
    // Groups of labels that touch: the sum of what each wants of the first one's place, and their number.
    let mut groups: Vec<(i64, i64)> = Vec::new();
    for n in &order {
        let mut group = (i64::from(wanted[*n]), 1);
        while let Some(before) =
            groups.pop_if(|b| b.0 / b.1 + b.1 * i64::from(LINE) > group.0 / group.1)
        {
            // Behind those of the group before, each wants the first one's place to be higher by their height.
            let behind = before.1 * i64::from(LINE);
            group = (before.0 + group.0 - group.1 * behind, before.1 + group.1);
        }
        groups.push(group);
    }
    let mut places = Vec::new();
    for (sum, count) in groups {
        let first = i32::try_from(sum / count).unwrap_or(top);
        places.extend((0..count).map(|n| first + n as i32 * LINE));
    }
    // Into the frame: from below, then from above.
    let mut limit = bottom;
    for place in places.iter_mut().rev() {
        *place = (*place).min(limit);
        limit = *place - LINE;
    }
    let mut limit = top;
    for place in &mut places {
        *place = (*place).max(limit);
        limit = *place + LINE;
    }
    let mut found = vec![0; wanted.len()];
    for (place, n) in places.into_iter().zip(order) {
        found[n] = place;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_with_room_stay() {
        assert_eq!(apart(&[200, 100, 150], 0, 300), [200, 100, 150]);
    }

    #[test]
    fn labels_move_apart_around_their_middle() {
        assert_eq!(
            apart(&[100, 100], 0, 300),
            [100 - LINE / 2 - 1, 100 + LINE / 2]
        );
        let places = apart(&[100, 101, 99, 250], 0, 300);
        assert_eq!(places[2] + LINE, places[0]);
        assert_eq!(places[0] + LINE, places[1]);
        assert!((places[0] - 100).abs() <= 1);
        assert_eq!(places[3], 250);
    }

    #[test]
    fn labels_never_touch_and_stay_inside() {
        let mut rng = fastrand::Rng::with_seed(pvblk_testing::seed());
        for _ in 0..1000 {
            let count = rng.usize(1..=8);
            let wanted: Vec<i32> = (0..count).map(|_| rng.i32(0..300)).collect();
            let mut places = apart(&wanted, 0, 300);
            // Lines don't cross on the way to their labels.
            for a in 0..count {
                for b in 0..count {
                    assert!(wanted[a] >= wanted[b] || places[a] < places[b]);
                }
            }
            places.sort_unstable();
            assert!(places.windows(2).all(|w| w[1] - w[0] >= LINE), "{places:?}");
            assert!(places[0] >= 0 && places[count - 1] <= 300, "{places:?}");
        }
    }
}
