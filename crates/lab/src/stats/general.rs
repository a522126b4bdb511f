//! Numbers as C's `printf("%g")` shows them, so that tables look as `ministat`'s do.

/// `value` with `digits` significant digits and no trailing zeros, as C's `%.{digits}g`.
pub fn general(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return value.to_string().to_lowercase();
    }
    let digits = digits.max(1);
    let scientific = format!("{value:.*e}", digits - 1);
    // The exponent after rounding: 999999.7 with six digits is 1e+06.
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let last = digits as i32 - 1;
    if (-4..=last).contains(&exponent) {
        let decimals = usize::try_from(last - exponent).unwrap_or(0);
        return without_zeros(&format!("{value:.decimals$}")).to_owned();
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{}e{sign}{:02}", without_zeros(mantissa), exponent.abs())
}

fn without_zeros(number: &str) -> &str {
    if number.contains('.') {
        number.trim_end_matches('0').trim_end_matches('.')
    } else {
        number
    }
}

#[cfg(test)]
mod tests {
    use super::general;

    #[test]
    fn as_c_prints_them() {
        for (value, digits, text) in [
            (0.0, 6, "0"),
            (100.0, 6, "100"),
            (123456.0, 6, "123456"),
            (999_999.7, 6, "1e+06"),
            (1_234_567.0, 6, "1.23457e+06"),
            (0.000_123_456_78, 6, "0.000123457"),
            (0.000_012_345, 6, "1.2345e-05"),
            (-2.5, 6, "-2.5"),
            (43.445_368_4, 8, "43.445368"),
            (1e100, 8, "1e+100"),
            (f64::INFINITY, 6, "inf"),
        ] {
            assert_eq!(general(value, digits), text);
        }
    }
}
