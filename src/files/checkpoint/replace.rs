//! Replacing a file as a whole: whatever happens, the path has the old file or the new one.
//!
//! 1. [`NewFile::at`] makes a temporary file in the folder of the target, because a rename is atomic only
//!    within one file system. It first removes such files of killed processes, which have no lock.
//! 2. The content is written, also by other processes ([`open_shared`]).
//! 3. [`NewFile::put`] flushes the file before the rename: otherwise a power cut could leave the target with
//!    an unfinished content. It then flushes the folder, which makes the rename durable.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::NamedTempFile;

use crate::error::{Error, ErrorKind, Result};

/// A new file for a path. If it is dropped before `put`, it leaves nothing.
#[derive(Debug)]
pub(super) struct NewFile {
    temporary: NamedTempFile,
    target: PathBuf,
    /// The permissions of the file that is replaced.
    permissions: Option<Permissions>,
}

impl NewFile {
    /// A temporary file in the folder of `path`.
    pub(super) fn at(path: &Path) -> Result<Self> {
        let target = without_links(path);
        let permissions =
            present(&target).map_err(failed("replace what is there"))?.map(|present| present.permissions());
        let temporary = temporary(&target, permissions.as_ref())
            .map_err(failed("make a temporary file in the same folder"))?;
        Ok(NewFile { temporary, target, permissions })
    }

    pub(super) fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// The name by which other processes can [open](open_shared) the file.
    pub(super) fn shared_name(&self) -> String {
        if cfg!(windows) {
            // On Windows a lock keeps other processes from writing.
            let _ = self.file().unlock();
        }
        self.temporary.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Flushes the file to the disk, and renames it to the path.
    pub(super) fn put(self) -> Result<()> {
        let NewFile { temporary, target, permissions } = self;
        // Not before, so that other ranks can open a file that replaces a read-only one. Best effort, because
        // some file systems have no permissions.
        let _ = permissions.map(|permissions| temporary.as_file().set_permissions(permissions));
        temporary.as_file().sync_all().map_err(failed("flush the file to the disk"))?;
        temporary.persist(&target).map_err(|error| failed("rename the temporary file")(error.error))?;
        let flushed = sync_folder(&target).map_err(failed("flush the folder to the disk"));
        flushed.map_err(|error| error.with_remedy("the file itself is whole and in its place"))
    }
}

/// Opens the new file for `path` that another process has made.
pub(super) fn open_shared(path: &Path, name: &str) -> Result<File> {
    let opened = File::options().write(true).open(folder(&without_links(path)).join(name));
    let opened = opened.map_err(failed("open the temporary file of rank 0"));
    opened.map_err(|error| error.with_remedy("save into a folder that all ranks see and may write"))
}

pub(super) fn failed(action: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::new(ErrorKind::Io, format!("cannot {action}")).caused_by(source)
}

/// The target of symbolic links, whether it exists or not, so that a link stays a link.
fn without_links(path: &Path) -> PathBuf {
    /// The most links that are followed, as in Linux.
    const LINKS: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = folder(&target).join(next),
            Err(_) => break,
        }
    }
    target
}

/// The file at a path that is to be replaced, if there is one.
fn present(target: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(target) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata)),
        Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // No error here: making the temporary file fails with a better one.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
        Err(error) => Err(error),
    }
}

/// A locked temporary file in the folder of `target`. It has the permissions of the file there, but is
/// writable, or those of a new file.
#[cfg_attr(not(unix), expect(unused_variables, reason = "files have modes on Unix alone"))]
fn temporary(target: &Path, present: Option<&Permissions>) -> io::Result<NamedTempFile> {
    let prefix = prefix(target);
    let folder = folder(target);
    remove_abandoned(&folder, |name| name == prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(SUFFIX).rand_bytes(RANDOM);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        builder.permissions(Permissions::from_mode(present.map_or(0o666, |present| present.mode() | 0o200)));
    }
    let temporary = builder.tempfile_in(&folder)?;
    // The lock shows others that the file is in use. Best effort, because some file systems have no locks.
    let _ = temporary.as_file().try_lock();
    Ok(temporary)
}

const SUFFIX: &str = ".partial";

/// The random characters of a temporary file's name.
const RANDOM: usize = 6;

/// The prefix of the names of temporary files; short enough for any file system.
pub(super) fn prefix(target: &Path) -> String {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    format!(".{}.", name.chars().take(50).collect::<String>())
}

/// The prefix in a temporary file's name.
fn prefix_in(name: &str) -> Option<&str> {
    let name = name.strip_suffix(SUFFIX)?;
    let (prefix, random) = name.split_at_checked(name.len().checked_sub(RANDOM)?)?;
    random.bytes().all(|byte| byte.is_ascii_alphanumeric()).then_some(prefix)
}

/// The temporary files of saves that were killed, each with its prefix: those that are not locked, and were
/// not written for at least `rest`.
pub(super) fn abandoned(
    folder: &Path,
    is_ours: impl Fn(&str) -> bool,
    rest: Duration,
) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let Some(prefix) = name.to_str().and_then(prefix_in).filter(|prefix| is_ours(prefix)) else {
            continue;
        };
        let Ok(metadata) = entry.metadata() else { continue };
        let age = metadata.modified().ok().and_then(|time| SystemTime::now().duration_since(time).ok());
        let is_at_rest = metadata.is_file() && age.is_some_and(|age| age >= rest);
        if is_at_rest && File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            found.push((prefix.to_string(), path));
        }
    }
    found
}

/// Removes temporary files of saves that were killed, except those that were written just now.
pub(super) fn remove_abandoned(folder: &Path, is_ours: impl Fn(&str) -> bool) {
    // A file in use may have no lock: on some file systems, and over ranks on Windows.
    const JUST: Duration = Duration::from_secs(60);
    for (_, path) in abandoned(folder, is_ours, JUST) {
        // Best effort: a file that cannot be removed does not stop the save.
        let _ = fs::remove_file(path);
    }
}

/// The folder of a file.
pub(super) fn folder(target: &Path) -> PathBuf {
    target
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Flushes the folder. Only Unix needs and allows that, and not every file system can.
fn sync_folder(target: &Path) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder(target)).and_then(|folder| folder.sync_all()) {
        Err(error) if matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported) => Ok(()),
        result => result,
    }
}
