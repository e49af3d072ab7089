//! What `forebay.publish()` leaves for this command: one small file for each process, in a folder of this user's.
//!
//! Nothing here trusts a file. The folder and the file must be this user's alone, the file small and whole, and the
//! process in it must be the one that runs under its pid now. What a killed process has left is removed. The writer is
//! `python/forebay/monitor/publisher.py`.

use std::fs::{self, Metadata, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The version of the file that is understood here.
const SCHEMA: u64 = 1;
/// A file has some 400 bytes.
const MOST_BYTES: u64 = 16 << 10;
/// No machine runs more processes of one user that train.
const MOST_FILES: usize = 4096;
/// Letters of a name that are shown.
const MOST_LETTERS: usize = 32;

/// The figures of one process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Published {
    #[serde(skip_serializing)]
    schema: u64,
    pub(crate) pid: u32,
    #[serde(skip_serializing)]
    start_ticks: u64,
    pub(crate) command: String,
    pub(crate) rank: u64,
    pub(crate) device: String,
    #[serde(skip_serializing)]
    unix_s: f64,
    /// How old the figures are; more than a few seconds for a process that was stopped.
    #[serde(skip_deserializing)]
    pub(crate) age_s: f64,
    pub(crate) pinned_bytes: u64,
    pub(crate) ring_bytes: u64,
    pub(crate) fetch_gbps: f64,
    pub(crate) store_gbps: f64,
    pub(crate) stalls: u64,
    pub(crate) stall_s: f64,
    pub(crate) saves: u64,
}

/// Why a folder is not read.
#[derive(Debug)]
pub(crate) enum Refused {
    /// There is none.
    Absent,
    /// It is not a folder of this user's alone.
    NotOurs,
}

/// The folders that `forebay.publish()` chooses from.
pub(crate) fn default_folders() -> Vec<PathBuf> {
    let user = user();
    [format!("/run/user/{user}/forebay"), format!("/dev/shm/forebay-{user}"), format!("/tmp/forebay-{user}")]
        .map(PathBuf::from)
        .to_vec()
}

/// The processes that publish into a folder, by pid.
pub(crate) fn read(folder: &Path) -> Result<Vec<Published>, Refused> {
    let found = fs::symlink_metadata(folder).map_err(|_| Refused::Absent)?;
    if !found.is_dir() || !is_ours_alone(&found) {
        return Err(Refused::NotOurs);
    }
    let entries = fs::read_dir(folder).map_err(|_| Refused::Absent)?;
    let paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).take(MOST_FILES).collect();
    let mut processes: Vec<Published> = paths.iter().filter_map(|path| read_file(path)).collect();
    processes.sort_by_key(|one| one.pid);
    Ok(processes)
}

/// The figures in a file; `None`, and the file is removed, if its process is gone.
fn read_file(path: &Path) -> Option<Published> {
    let name = path.file_name()?.to_str()?;
    if let Some(pid) =
        name.strip_prefix('.').and_then(|rest| rest.strip_suffix(".new")).and_then(|pid| pid.parse().ok())
    {
        if start_ticks(pid).is_none() {
            let _ = fs::remove_file(path);
        }
        return None;
    }
    let pid: u32 = name.strip_suffix(".json")?.parse().ok()?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).ok()?;
    let about = file.metadata().ok()?;
    if !about.is_file() || !is_ours_alone(&about) || about.nlink() != 1 || about.len() > MOST_BYTES {
        return None;
    }
    let mut text = String::new();
    file.take(MOST_BYTES).read_to_string(&mut text).ok()?;
    let mut found: Published = serde_json::from_str(&text).ok()?;
    let is_whole = [found.fetch_gbps, found.store_gbps, found.stall_s].iter().all(|number| *number >= 0.0);
    if found.schema != SCHEMA || found.pid != pid || !is_whole {
        return None;
    }
    if start_ticks(pid) != Some(found.start_ticks) {
        let _ = fs::remove_file(path);
        return None;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64());
    found.age_s = (now - found.unix_s).max(0.0);
    (found.command, found.device) = (printable(&found.command), printable(&found.device));
    Some(found)
}

/// Whether something is this user's, and nobody else may use it.
fn is_ours_alone(about: &Metadata) -> bool {
    about.uid() == user() && about.mode() & 0o077 == 0
}

/// The user who runs this command.
fn user() -> u32 {
    // The kernel's entry of a process belongs to its user. Asking the system itself would need `unsafe`.
    fs::metadata("/proc/self").map_or(u32::MAX, |about| about.uid())
}

/// When the process with a pid began, as the kernel counts it; `None` if there is no such process.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may have spaces and parentheses of its own.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// A name that can be printed: no control characters, nothing that turns text around, and not too long.
fn printable(name: &str) -> String {
    let shown = |letter: char| if letter.is_alphanumeric() || letter.is_ascii_graphic() { letter } else { '?' };
    name.chars().map(shown).take(MOST_LETTERS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_steer_a_terminal() {
        assert_eq!(printable("train.py"), "train.py");
        assert_eq!(printable("a\x1b[2Jb\rc\nd\u{202e}e f"), "a?[2Jb?c?d?e?f");
        assert_eq!(printable(&"x".repeat(100)).len(), MOST_LETTERS);
    }

    #[test]
    fn a_process_is_known_by_its_start() {
        assert!(start_ticks(std::process::id()).is_some());
        assert_eq!(start_ticks(u32::MAX), None);
    }
}
