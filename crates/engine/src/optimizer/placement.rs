//! Where state lies and what updates it.

use super::hybrid::HostShare;
use crate::error::{Error, Result};

/// Where state lies and who updates it. The bits are the same everywhere.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Placement {
    /// State lies on the device, with the caller.
    Resident,
    /// State lies on the host and streams through a ring on the device.
    Stream,
    /// State lies on the host and is updated there.
    Host,
    /// State lies on the host; this share of it is updated there, and the rest streams.
    Hybrid(HostShare),
}

impl Placement {
    /// The placement of a name. `host_share` is for `hybrid` only; with `None` the first steps measure it.
    pub fn named(name: &str, host_share: Option<f64>) -> Result<Self> {
        match (name, host_share) {
            ("resident", _) => Ok(Self::Resident),
            ("stream", _) => Ok(Self::Stream),
            ("host", _) => Ok(Self::Host),
            ("hybrid", None) => Ok(Self::Hybrid(HostShare::Auto)),
            ("hybrid", Some(share)) => Ok(Self::Hybrid(HostShare::Fixed(share))),
            _ => Err(Error::InvalidOption {
                option: "placement",
                value: name.to_owned(),
                remedy: "use stream, resident, host or hybrid".to_owned(),
            }),
        }
    }

    /// Whether state streams through a ring on the device.
    pub fn streams(self) -> bool {
        match self {
            Self::Resident | Self::Host => false,
            Self::Stream => true,
            Self::Hybrid(share) => share != HostShare::Fixed(1.0),
        }
    }

    /// The share that the host updates, if it updates any.
    pub fn host_share(self) -> Option<HostShare> {
        match self {
            Self::Resident | Self::Stream | Self::Hybrid(HostShare::Fixed(0.0)) => None,
            Self::Host => Some(HostShare::Fixed(1.0)),
            Self::Hybrid(share) => Some(share),
        }
    }

    /// Whether a step reports on the host's part, which may be nothing.
    pub(super) fn reports_host(self) -> bool {
        matches!(self, Self::Host | Self::Hybrid(_))
    }
}
