//! Folders: which checkpoint of a path is loaded, and how a new one is made.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use super::{MANIFEST, refuse};
use crate::error::{Error, Result};

/// The file that a save to a path keeps locked. The system unlocks it when the process ends, even if it is killed.
const LOCK: &str = ".saving";
/// The manifest's name until it is complete.
const PARTIAL: &str = "manifest.json.partial";
const DIGITS: usize = 8;

/// Subfolders with numbers for names, in ascending order.
fn numbered(path: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = fs::read_dir(path).map_err(|error| Error::file("list", path, &error))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| Error::file("list", path, &error))?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_number = name.len() == DIGITS && name.bytes().all(|byte| byte.is_ascii_digit());
        if is_number
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Ok(number) = name.parse()
        {
            found.push((number, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

fn is_complete(folder: &Path) -> bool {
    folder.join(MANIFEST).is_file()
}

/// The complete checkpoints of a path, oldest first.
pub fn complete(path: &Path) -> Result<Vec<PathBuf>> {
    Ok(numbered(path)?.into_iter().map(|(_, folder)| folder).filter(|folder| is_complete(folder)).collect())
}

/// The folder of the checkpoint to load: the path itself if it has a manifest, else its last complete subfolder.
pub fn latest(path: &Path) -> Result<PathBuf> {
    if is_complete(path) {
        return Ok(path.to_owned());
    }
    match complete(path)?.pop() {
        Some(folder) => Ok(folder),
        None => refuse(path, format!("no complete checkpoint: neither it nor a numbered subfolder has a {MANIFEST}")),
    }
}

/// Removes all complete checkpoints of a path but the last `keep`. The manifest is removed first, so a checkpoint that is
/// removed by half is incomplete.
pub fn prune(path: &Path, keep: usize) -> Result<()> {
    let folders = complete(path)?;
    for folder in &folders[..folders.len().saturating_sub(keep)] {
        let manifest = folder.join(MANIFEST);
        fs::remove_file(&manifest).map_err(|error| Error::file("remove", &manifest, &error))?;
        sync_folder(folder)?;
        remove(folder)?;
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", folder, &error)),
        _ => Ok(()),
    }
}

/// Makes the names in a folder last.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    let opened = File::open(folder).and_then(|folder| folder.sync_all());
    opened.map_err(|error| Error::file("sync", folder, &error))
}

/// A save under way, in a new subfolder. The coordinator has one. Where it is dropped before [`Self::commit`], the
/// subfolder stays as it is, incomplete: other ranks may still be writing into it.
#[derive(Debug)]
pub struct Saving {
    path: PathBuf,
    folder: PathBuf,
    _lock: File,
}

impl Saving {
    /// Makes the path if it does not exist, removes incomplete subfolders, and makes one with the next number.
    pub fn begin(path: &Path) -> Result<Self> {
        if is_complete(path) {
            // A load of this path would still find the old checkpoint.
            return refuse(path, "it is a checkpoint itself; save to the folder that it is in, or to another");
        }
        fs::create_dir_all(path).map_err(|error| Error::file("create", path, &error))?;
        let lock_path = path.join(LOCK);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = opened.map_err(|error| Error::file("create", &lock_path, &error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return refuse(path, "another save to this path is running; wait for it, or save to another path");
            }
            // The file system has no locks.
            Err(TryLockError::Error(_)) => {}
        }
        let earlier = numbered(path)?;
        for (_, leftover) in earlier.iter().filter(|(_, folder)| !is_complete(folder)) {
            remove(leftover)?;
        }
        let number = earlier.last().map_or(0, |(number, _)| *number) + 1;
        let folder = path.join(format!("{number:0DIGITS$}"));
        fs::create_dir(&folder).map_err(|error| Error::file("create", &folder, &error))?;
        let saving = Self { path: path.to_owned(), folder, _lock: lock };
        match sync_folder(path) {
            Ok(()) => Ok(saving),
            Err(error) => Err(saving.failed(error)),
        }
    }

    /// The folder to write files into.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// [Commits](Self::commit) with a manifest given as JSON.
    pub fn commit_json(self, manifest: &str, keep_last: Option<usize>) -> Result<PathBuf> {
        match serde_json::from_str(manifest) {
            Ok(manifest) => self.commit(&manifest, keep_last),
            Err(error) => {
                let refused = refuse(&self.folder, format!("its manifest: {error}"));
                self.discard();
                refused
            }
        }
    }

    /// Completes the checkpoint: after the rename in here it is the one to load. All files have been synced. A failure
    /// before the rename [discards](Self::discard) what was written.
    pub fn commit(self, manifest: &Manifest, keep_last: Option<usize>) -> Result<PathBuf> {
        match self.complete(manifest, keep_last) {
            Ok(()) => Ok(self.folder),
            Err(error) => Err(self.failed(error)),
        }
    }

    /// Removes the subfolder with what was written, unless it is complete, so that a full disk has its room again. No
    /// rank may be writing any more. A failure is ignored: a load ignores what is left, and the next save removes it.
    pub fn discard(self) {
        if !is_complete(&self.folder) {
            let _ = remove(&self.folder);
        }
    }

    fn failed(self, error: Error) -> Error {
        self.discard();
        error
    }

    fn complete(&self, manifest: &Manifest, keep_last: Option<usize>) -> Result<()> {
        let target = self.folder.join(MANIFEST);
        manifest.check(&target)?;
        let text = manifest.encode(&target)?;
        for file in &manifest.files {
            let path = self.folder.join(&file.name);
            let found = fs::metadata(&path).map_err(|error| Error::file("find", &path, &error))?.len();
            if found != file.bytes {
                return refuse(&path, format!("{found} bytes where {} were written", file.bytes));
            }
        }
        let partial = self.folder.join(PARTIAL);
        let written = File::create(&partial).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
        written.map_err(|error| Error::file("write", &partial, &error))?;
        sync_folder(&self.folder)?;
        fs::rename(&partial, &target).map_err(|error| Error::file("rename", &partial, &error))?;
        sync_folder(&self.folder)?;
        if let Some(keep) = keep_last {
            prune(&self.path, keep.max(1))?;
        }
        Ok(())
    }
}
