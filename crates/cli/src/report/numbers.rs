//! Numbers as people read them.

/// Bytes in three digits.
pub(crate) fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit < 4 {
        value /= 1e3;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        small if small < 9.995 => 2,
        middle if middle < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", ["bytes", "kB", "MB", "GB", "TB"][unit])
}

/// A time in the unit that keeps it short.
pub(crate) fn seconds(value: f64) -> String {
    match value.abs() {
        // Less than a clock shows.
        none if none < 1e-9 => "0 ms".to_owned(),
        small if small < 1e-4 => format!("{:.1} us", value * 1e6),
        small if small < 0.01 => format!("{:.2} ms", value * 1e3),
        small if small < 0.1 => format!("{:.1} ms", value * 1e3),
        middle if middle < 0.9995 => format!("{:.0} ms", value * 1e3),
        large if large < 9.995 => format!("{value:.2} s"),
        _ => format!("{value:.1} s"),
    }
}

pub(crate) fn percent(share: f64) -> String {
    match share.abs() * 100.0 {
        0.0 => "0 %".to_owned(),
        small if small < 1.0 => format!("{:.2} %", share * 100.0),
        middle if middle < 10.0 => format!("{:.1} %", share * 100.0),
        _ => format!("{:.0} %", share * 100.0),
    }
}

/// Device memory, which is sold and set in powers of two.
pub(crate) fn gib(bytes: u64) -> String {
    let value = bytes as f64 / f64::from(1 << 30);
    let text = format!("{value:.2}");
    format!("{} GiB", text.trim_end_matches('0').trim_end_matches('.'))
}

pub(crate) fn gbps(rate: f64) -> String {
    format!("{rate:.1} GB/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_short() {
        for (value, text) in [
            (0.0, "0 ms"),
            (2e-6, "2.0 us"),
            (0.00123, "1.23 ms"),
            (0.0456, "45.6 ms"),
            (0.4801, "480 ms"),
            (1.234, "1.23 s"),
            (12.34, "12.3 s"),
        ] {
            assert_eq!(seconds(value), text);
        }
        for (share, text) in [(0.0, "0 %"), (0.0034, "0.34 %"), (0.034, "3.4 %"), (0.628, "63 %")] {
            assert_eq!(percent(share), text);
        }
        for (bytes, text) in [(0, "0 bytes"), (999, "999 bytes"), (16_777_216, "16.8 MB"), (9_663_676_416, "9.66 GB")] {
            assert_eq!(size(bytes), text);
        }
        for (bytes, text) in [(4 << 30, "4 GiB"), (1_342_177_280, "1.25 GiB"), (100 << 20, "0.1 GiB")] {
            assert_eq!(gib(bytes), text);
        }
    }
}
