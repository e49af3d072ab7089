//! Folders: which checkpoint of a path is the one to load, and how a new one comes to be.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use super::manifest::Manifest;
use super::{MANIFEST, file_error, refuse};
use crate::error::Result;

/// Held by whoever saves to a path; the system lets go of it when the process ends, however it ends.
const LOCK: &str = ".saving";
/// The manifest until it is complete.
const PARTIAL: &str = "manifest.json.partial";
const DIGITS: usize = 8;

/// Subfolders with numbers for names, in ascending order.
fn numbered(path: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let entries = fs::read_dir(path).map_err(|error| file_error("list", path, &error))?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| file_error("list", path, &error))?;
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

/// Removes all complete checkpoints of a path but the last `keep`. Each loses its manifest first, so that one that is
/// half removed is a leftover.
pub fn prune(path: &Path, keep: usize) -> Result<()> {
    let folders = complete(path)?;
    for folder in &folders[..folders.len().saturating_sub(keep)] {
        let manifest = folder.join(MANIFEST);
        fs::remove_file(&manifest).map_err(|error| file_error("remove", &manifest, &error))?;
        sync_folder(folder)?;
        remove(folder)?;
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(file_error("remove", folder, &error)),
        _ => Ok(()),
    }
}

/// Makes the names in a folder last.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    let opened = File::open(folder).and_then(|folder| folder.sync_all());
    opened.map_err(|error| file_error("sync", folder, &error))
}

/// A save under way, in a new subfolder. The coordinator has one; dropped before [`Self::commit`], it leaves a leftover.
#[derive(Debug)]
pub struct Saving {
    path: PathBuf,
    folder: PathBuf,
    _lock: File,
}

impl Saving {
    /// Makes the path if need be, removes what earlier saves left incomplete, and makes a subfolder with the next number.
    pub fn begin(path: &Path) -> Result<Self> {
        if is_complete(path) {
            // A load of this path would go on finding the old one.
            return refuse(path, "it is a checkpoint itself; save to the folder that it is in, or to another");
        }
        fs::create_dir_all(path).map_err(|error| file_error("create", path, &error))?;
        let lock_path = path.join(LOCK);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).open(&lock_path);
        let lock = opened.map_err(|error| file_error("create", &lock_path, &error))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return refuse(path, "another save to this path is under way; wait for it, or save to another path");
            }
            // A file system without locks: then nobody holds one.
            Err(TryLockError::Error(_)) => {}
        }
        let earlier = numbered(path)?;
        for (_, leftover) in earlier.iter().filter(|(_, folder)| !is_complete(folder)) {
            remove(leftover)?;
        }
        let number = earlier.last().map_or(0, |(number, _)| *number) + 1;
        let folder = path.join(format!("{number:0DIGITS$}"));
        fs::create_dir(&folder).map_err(|error| file_error("create", &folder, &error))?;
        sync_folder(path)?;
        Ok(Self { path: path.to_owned(), folder, _lock: lock })
    }

    /// The folder to write files into.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Completes the checkpoint: from the rename in here on, it is the one to load. All files have been synced.
    pub fn commit(self, manifest: &Manifest, keep_last: Option<usize>) -> Result<PathBuf> {
        let target = self.folder.join(MANIFEST);
        manifest.check(&target)?;
        let text = manifest.encode(&target)?;
        for file in &manifest.files {
            let path = self.folder.join(&file.name);
            let found = fs::metadata(&path).map_err(|error| file_error("find", &path, &error))?.len();
            if found != file.bytes {
                return refuse(&path, format!("{found} bytes where {} were written", file.bytes));
            }
        }
        let partial = self.folder.join(PARTIAL);
        let written = File::create(&partial).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
        written.map_err(|error| file_error("write", &partial, &error))?;
        sync_folder(&self.folder)?;
        fs::rename(&partial, &target).map_err(|error| file_error("rename", &partial, &error))?;
        sync_folder(&self.folder)?;
        if let Some(keep) = keep_last {
            prune(&self.path, keep.max(1))?;
        }
        Ok(self.folder)
    }
}
