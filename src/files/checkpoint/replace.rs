//! Replacing a file as a whole: whatever happens, the path has the old file or the new one.
//!
//! 1. [`NewFile::create`] makes a temporary file in the folder of the target, because a rename is atomic only
//!    within one file system. It first removes temporary files of killed processes: nobody locks these.
//! 2. The content is written, also by other processes ([`open_shared`]).
//! 3. [`NewFile::persist`] flushes the file before the rename: otherwise a power cut could leave the target
//!    with unfinished content. After the rename `persist` flushes the folder, which makes the rename
//!    durable.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tempfile::NamedTempFile;

use crate::error::{Error, ErrorKind, Result};

/// A new file for a path. If the value is dropped before `persist`, the temporary file is removed.
#[derive(Debug)]
pub(super) struct NewFile {
    temporary: NamedTempFile,
    target: PathBuf,
    /// The permissions of the file that is replaced.
    permissions: Option<Permissions>,
}

impl NewFile {
    /// Makes a temporary file in the folder of `path`.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let target = without_links(path);
        let old_metadata = replaced_metadata(&target).map_err(io_failure("replace what is there"))?;
        let permissions = old_metadata.map(|metadata| metadata.permissions());
        let temporary = create_temporary(&target, permissions.as_ref())
            .map_err(io_failure("make a temporary file in the same folder"))?;
        Ok(NewFile {
            temporary,
            target,
            permissions,
        })
    }

    pub(super) fn file(&self) -> &File {
        self.temporary.as_file()
    }

    /// Lets other processes [open](open_shared) the file by the returned name.
    pub(super) fn share(&self) -> String {
        if cfg!(windows) {
            // On Windows a lock keeps other processes from writing.
            let _ = self.file().unlock();
        }
        self.temporary
            .path()
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    }

    /// Flushes the file to the disk, and renames it to the path.
    pub(super) fn persist(self) -> Result<()> {
        let NewFile {
            temporary,
            target,
            permissions,
        } = self;
        // Permissions are set only now, so that other ranks can open a file that replaces a read-only file.
        // An error is ignored, because some file systems have no permissions.
        let _ = permissions.map(|permissions| temporary.as_file().set_permissions(permissions));
        temporary
            .as_file()
            .sync_all()
            .map_err(io_failure("flush the file to the disk"))?;
        temporary
            .persist(&target)
            .map_err(|error| io_failure("rename the temporary file")(error.error))?;
        sync_folder(&target)
            .map_err(io_failure("flush the folder to the disk"))
            .map_err(|error| error.with_remedy("the file itself is whole and in its place"))
    }
}

/// Opens the new file for `path` that another process has made.
pub(super) fn open_shared(path: &Path, name: &str) -> Result<File> {
    File::options()
        .write(true)
        .open(folder_of(&without_links(path)).join(name))
        .map_err(io_failure("open the temporary file of rank 0"))
        .map_err(|error| error.with_remedy("save into a folder that all ranks see and may write"))
}

/// Makes the error that an action of the file system failed.
pub(super) fn io_failure(action: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::new(ErrorKind::Io, format!("cannot {action}")).caused_by(source)
}

/// The target of symbolic links, whether the target exists or not. The new file replaces this target, because
/// a link has to stay a link.
fn without_links(path: &Path) -> PathBuf {
    /// The limit of links in a row, as in Linux.
    const MAX_LINKS: usize = 40;
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&target) {
            Ok(next) => target = folder_of(&target).join(next),
            Err(_) => break,
        }
    }
    target
}

/// The metadata of the file that a new file at this path replaces, if there is one.
fn replaced_metadata(target: &Path) -> io::Result<Option<Metadata>> {
    match fs::metadata(target) {
        Ok(metadata) if metadata.is_file() => Ok(Some(metadata)),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // This is no error here, because `create_temporary` returns a better one.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(None),
        Err(error) => Err(error),
    }
}

/// Makes a locked temporary file in the folder of `target`.
///
/// The file gets the permissions of the old file, but is writable. Without an old file the permissions are
/// those of any new file.
#[cfg_attr(
    not(unix),
    expect(unused_variables, reason = "files have modes on Unix alone")
)]
fn create_temporary(target: &Path, permissions: Option<&Permissions>) -> io::Result<NamedTempFile> {
    let prefix = prefix_for(target);
    let folder = folder_of(target);
    remove_abandoned(&folder, |found_prefix| found_prefix == prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(SUFFIX).rand_bytes(RANDOM_LENGTH);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = permissions.map_or(0o666, |permissions| permissions.mode() | 0o200);
        builder.permissions(Permissions::from_mode(mode));
    }
    let temporary = builder.tempfile_in(&folder)?;
    // The lock shows other processes that the file is in use. An error is ignored, because some file systems
    // have no locks.
    let _ = temporary.as_file().try_lock();
    Ok(temporary)
}

/// The suffix of the names of temporary files.
const SUFFIX: &str = ".partial";

/// The number of random characters in the name of a temporary file.
const RANDOM_LENGTH: usize = 6;

/// The prefix of the names of temporary files for a target, short enough for any file system.
pub(super) fn prefix_for(target: &Path) -> String {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    format!(".{}.", name.chars().take(50).collect::<String>())
}

/// The prefix in a temporary file's name.
fn prefix_in(name: &str) -> Option<&str> {
    let name = name.strip_suffix(SUFFIX)?;
    let (prefix, random) = name.split_at_checked(name.len().checked_sub(RANDOM_LENGTH)?)?;
    random
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric())
        .then_some(prefix)
}

/// The temporary files of saves that were killed, each with its prefix.
///
/// These are files that no process has locked, and that nobody has written to for at least `idle_time`.
pub(super) fn abandoned_files(
    folder: &Path,
    is_ours: impl Fn(&str) -> bool,
    idle_time: Duration,
) -> Vec<(String, PathBuf)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let Some(prefix) = name.to_str().and_then(prefix_in).filter(|prefix| is_ours(prefix)) else {
            continue;
        };
        let Ok(metadata) = entry.metadata() else { continue };
        let age = metadata
            .modified()
            .ok()
            .and_then(|time| SystemTime::now().duration_since(time).ok());
        let is_idle = metadata.is_file() && age.is_some_and(|age| age >= idle_time);
        if is_idle && File::open(&path).is_ok_and(|file| file.try_lock().is_ok()) {
            files.push((prefix.to_string(), path));
        }
    }
    files
}

/// Removes temporary files of saves that were killed, except files written within the last minute.
pub(super) fn remove_abandoned(folder: &Path, is_ours: impl Fn(&str) -> bool) {
    // A file in use may have no lock: on some file systems, and on Windows if several ranks write the file.
    // So recently written files stay.
    const IDLE_TIME: Duration = Duration::from_secs(60);
    for (_, path) in abandoned_files(folder, is_ours, IDLE_TIME) {
        // An error is ignored, because a file that cannot be removed does not stop the save.
        let _ = fs::remove_file(path);
    }
}

/// The folder of a file.
pub(super) fn folder_of(target: &Path) -> PathBuf {
    target
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Flushes the folder of a file. Only Unix needs and allows this flush, and not every file system can do so.
fn sync_folder(target: &Path) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(folder_of(target)).and_then(|folder| folder.sync_all()) {
        Err(error) if matches!(error.kind(), InvalidInput | PermissionDenied | Unsupported) => Ok(()),
        result => result,
    }
}
