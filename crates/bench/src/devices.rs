//! The device to measure on.

use forebay::device::{CpuDevice, CpuOptions, LinkOptions, SharedDevice, open, open_default};
use forebay::error::{Error, Result};

/// A link that the CPU backend simulates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// GB/s each way.
    pub gbps: f64,
    /// Whether both ways share this rate.
    pub is_shared: bool,
}

/// Opens the named device, or by default the first GPU, or the CPU where there is none. With a link it is the CPU.
pub fn open_device(name: Option<&str>, link: Option<Link>) -> Result<SharedDevice> {
    let Some(Link { gbps, is_shared }) = link else {
        return Ok(name.map_or_else(open_default, open)?);
    };
    if name.is_some_and(|name| name != "cpu") {
        return Err(Error::InvalidOption {
            option: "link_gbps",
            value: gbps.to_string(),
            remedy: "only the CPU backend has a simulated link; add --device cpu or leave it out".to_owned(),
        });
    }
    let rate = gbps * 1e9;
    let link = LinkOptions { fetch_bytes_per_s: rate, store_bytes_per_s: rate, duplex: !is_shared };
    Ok(CpuDevice::open(CpuOptions { link: Some(link), ..CpuOptions::default() })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_simulated_on_the_cpu_only() {
        let link = Some(Link { gbps: 5.0, is_shared: false });
        for name in [None, Some("cpu")] {
            assert_eq!(open_device(name, link).unwrap().info().name, "cpu");
        }
        let refused = open_device(Some("cuda:0"), link).unwrap_err().to_string();
        assert!(refused.contains("link_gbps: 5"), "{refused}");
    }
}
