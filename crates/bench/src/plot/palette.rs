//! The looks by which series are told apart: a colour, a dash and a marker, none of which two of them share.

/// The looks of charts, on white and on dark ground.
pub const CSS: &str = include_str!("plot.css");

/// Most series of a chart.
pub const MOST_SERIES: usize = 8;

/// `stroke-dasharray` of lines.
pub const DASHES: [&str; MOST_SERIES] = [
    "none",
    "9 4",
    "3 3",
    "12 3 3 3",
    "18 5",
    "6 2",
    "12 3 3 3 3 3",
    "1 5",
];

/// The outlines of markers, in pixels around their middle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    Disc,
    Ring,
    /// A filled polygon.
    Filled(&'static [(i32, i32)]),
    /// Two lines that cross, each by its ends.
    Strokes([[(i32, i32); 2]; 2]),
}

pub const MARKERS: [Marker; MOST_SERIES] = [
    Marker::Disc,
    Marker::Filled(&[(-4, -4), (4, -4), (4, 4), (-4, 4)]),
    Marker::Filled(&[(0, -6), (6, 5), (-6, 5)]),
    Marker::Filled(&[(0, -6), (6, 0), (0, 6), (-6, 0)]),
    Marker::Strokes([[(-4, -4), (4, 4)], [(-4, 4), (4, -4)]]),
    Marker::Filled(&[(0, 6), (6, -5), (-6, -5)]),
    Marker::Strokes([[(-6, 0), (6, 0)], [(0, -6), (0, 6)]]),
    Marker::Ring,
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Linear light, 0 to 1.
    type Light = [f64; 3];

    fn light(hex: &str) -> Light {
        let hex = hex.trim_start_matches('#');
        let wide: String = match hex.len() {
            3 => hex.chars().flat_map(|c| [c, c]).collect(),
            _ => hex.to_owned(),
        };
        let number = u32::from_str_radix(&wide, 16).unwrap();
        [16, 8, 0].map(|shift| {
            let v = f64::from(number >> shift & 255) / 255.0;
            if v <= 0.04045 {
                v / 12.92
            } else {
                ((v + 0.055) / 1.055).powf(2.4)
            }
        })
    }

    /// The colours of the class's `property` on white and on dark ground.
    fn of(class: &str, property: &str) -> [Light; 2] {
        let (white, dark) = CSS.split_once("@media").unwrap();
        [white, dark].map(|css| {
            let rule = css.split('}').find(|rule| {
                let names = rule.split('{').next().unwrap_or_default();
                names.split(',').any(|n| n.trim() == format!(".{class}"))
                    || names.trim_end().ends_with(&format!("\n.{class}"))
            });
            let rule = rule.unwrap_or_else(|| {
                let first = css.split('}').find(|r| r.contains(&format!(".{class}{{")));
                first.unwrap_or_else(|| panic!("no .{class}"))
            });
            let value = rule.split(&format!("{property}:")).nth(1).unwrap();
            light(value)
        })
    }

    /// Machado, Oliveira and Fernandes (2009): what people without one kind of cone see, of linear light.
    const SIGHTS: [(&str, [[f64; 3]; 3]); 4] = [
        (
            "normal",
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
        ),
        (
            "protanopia",
            [
                [0.152_286, 1.052_583, -0.204_868],
                [0.114_503, 0.786_281, 0.099_216],
                [-0.003_882, -0.048_116, 1.051_998],
            ],
        ),
        (
            "deuteranopia",
            [
                [0.367_322, 0.860_646, -0.227_968],
                [0.280_085, 0.672_501, 0.047_413],
                [-0.011_820, 0.042_940, 0.968_881],
            ],
        ),
        (
            "tritanopia",
            [
                [1.255_528, -0.076_749, -0.178_779],
                [-0.078_411, 0.930_809, 0.147_602],
                [0.004_733, 0.691_367, 0.303_900],
            ],
        ),
    ];

    /// Oklab, in which distances are what eyes see.
    fn oklab([r, g, b]: Light) -> Light {
        let cone = |m: [f64; 3]| (m[0] * r + m[1] * g + m[2] * b).max(0.0).cbrt();
        let l = cone([0.412_221_470_8, 0.536_332_536_3, 0.051_445_992_9]);
        let m = cone([0.211_903_498_2, 0.680_699_545_1, 0.107_396_956_6]);
        let s = cone([0.088_302_461_9, 0.281_718_837_6, 0.629_978_700_5]);
        [
            0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
            1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
            0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
        ]
    }

    fn distance(a: Light, b: Light) -> f64 {
        let (a, b) = (oklab(a), oklab(b));
        let squares = a.iter().zip(b).map(|(a, b)| (a - b).powi(2));
        squares.sum::<f64>().sqrt()
    }

    fn seen(colour: Light, sight: &[[f64; 3]; 3]) -> Light {
        let row = |row: &[f64; 3]| row.iter().zip(colour).map(|(m, c)| m * c).sum::<f64>();
        [row(&sight[0]), row(&sight[1]), row(&sight[2])].map(|v| v.clamp(0.0, 1.0))
    }

    /// Of WCAG 2: 1 to 21.
    fn contrast(a: Light, b: Light) -> f64 {
        let luminance = |c: Light| 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
        let (a, b) = (luminance(a) + 0.05, luminance(b) + 0.05);
        a.max(b) / a.min(b)
    }

    #[test]
    fn no_two_series_look_alike() {
        for ground in 0..2 {
            for a in 0..MOST_SERIES {
                for b in 0..a {
                    let of = |n: usize| of(&format!("s{n}"), "color")[ground];
                    for (sight, matrix) in &SIGHTS {
                        let apart = distance(seen(of(a), matrix), seen(of(b), matrix));
                        assert!(
                            apart > 0.05,
                            "ground {ground}: {a} and {b} by {sight}: {apart:.3}"
                        );
                    }
                }
            }
        }
        assert_eq!(HashSet::from(DASHES).len(), MOST_SERIES);
        for a in 0..MOST_SERIES {
            assert!(MARKERS[..a].iter().all(|b| *b != MARKERS[a]));
        }
    }

    #[test]
    fn everything_can_be_read_on_its_ground() {
        let grounds = of("ground", "fill");
        for (n, ground) in grounds.into_iter().enumerate() {
            for class in ["ink", "quiet"] {
                let found = contrast(of(class, "fill")[n], ground);
                assert!(found >= 4.5, "{class}: {found:.1}");
            }
            for series in 0..MOST_SERIES {
                let colour = of(&format!("s{series}"), "color")[n];
                // Lines have dashes and markers beside.
                let found = contrast(colour, ground);
                assert!(found >= 2.0, "ground {n}, series {series}: {found:.1}");
                let text = contrast(of(&format!("on{series}"), "fill")[n], colour);
                assert!(text >= 3.4, "ground {n}, text on {series}: {text:.1}");
            }
        }
    }
}
