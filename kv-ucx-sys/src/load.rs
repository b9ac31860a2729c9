//! Finds libucp at run time.

use std::ffi::{CStr, CString, OsStr};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::Library;
use thiserror::Error;

use crate::api::{Api, Libraries};

/// Names the folder of libucp, or the file itself, if it is not the system's. It does not begin with `UCX_`,
/// because UCX warns of variables of that name which it does not know.
pub const LIBRARY_VARIABLE: &str = "KV_UCX_LIBRARY";

/// Oldest version whose structs are those declared here.
pub const OLDEST_MINOR: u32 = 13;

const UCP: &str = "libucp.so.0";
const UCS: &str = "libucs.so.0";

/// Why UCX cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// It was not found, or the system refused to load it.
    #[error("cannot load {library}: {reason}")]
    NotLoaded {
        /// Name or path of the library.
        library: String,
        /// What the loader of the system said.
        reason: String,
    },
    /// A function is not there, so this is not UCX, or a damaged one.
    #[error("{library} has no function {function}")]
    MissingFunction {
        /// Name or path of the library.
        library: String,
        /// The function looked for.
        function: &'static str,
    },
    /// The version is older than [`OLDEST_MINOR`], or of another major number.
    #[error("{library} is UCX {major}.{minor}; 1.{OLDEST_MINOR} or newer of major 1 is needed")]
    WrongVersion {
        /// Name or path of the library.
        library: String,
        /// Its major number.
        major: u32,
        /// Its minor number.
        minor: u32,
    },
}

static LOADED: Mutex<Option<&'static Api>> = Mutex::new(None);

/// UCX as this process has it: the one loaded already, by us or by anybody else; then the one at `path`, or at
/// the path in [`LIBRARY_VARIABLE`]; then the system's. It is never unloaded, because UCX does not survive that.
pub fn load(path: Option<&Path>) -> Result<&'static Api, LoadError> {
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(api) = *loaded {
        return Ok(api);
    }
    let named = path.map(Path::to_owned).or_else(|| std::env::var_os(LIBRARY_VARIABLE).map(PathBuf::from));
    let api: &'static Api = Box::leak(Box::new(find(named.as_deref())?));
    *loaded = Some(api);
    Ok(api)
}

fn find(named: Option<&Path>) -> Result<Api, LoadError> {
    // Two UCXs in one process take each other's memory hooks: whichever is there already is the one to use.
    if let (Some(ucp), Some(ucs)) = (present(UCP), present(UCS)) {
        return check(ucp, ucs, format!("{UCP}, already loaded"));
    }
    let (folder, ucp_name) = match named {
        None => (None, OsStr::new(UCP)),
        Some(path) if path.is_dir() => (Some(path), OsStr::new(UCP)),
        Some(path) => (path.parent(), path.file_name().unwrap_or(path.as_os_str())),
    };
    let at = |name: &OsStr| folder.map_or_else(|| PathBuf::from(name), |folder| folder.join(name));
    // First, so that libucp finds the one beside it and not another.
    let ucs = open(&at(OsStr::new(UCS)))?;
    let path = at(ucp_name);
    // Constructors have run: what was loaded is never unloaded, whatever comes of it.
    let ucp = match open(&path) {
        Ok(ucp) => ucp,
        Err(error) => {
            std::mem::forget(ucs);
            return Err(error);
        }
    };
    check(ucp, ucs, path.display().to_string())
}

/// A library that somebody has loaded already.
fn present(name: &str) -> Option<Library> {
    // SAFETY: nothing is loaded, so no code of the library runs.
    unsafe { Library::open(Some(name), libc::RTLD_NOLOAD | libc::RTLD_NOW | libc::RTLD_LOCAL) }.ok()
}

fn open(path: &Path) -> Result<Library, LoadError> {
    // SAFETY: code of the library runs while it is loaded. Whoever names a path vouches for what is there.
    unsafe { Library::open(Some(path), libc::RTLD_NOW | libc::RTLD_LOCAL) }.map_err(|error| {
        LoadError::NotLoaded { library: path.display().to_string(), reason: error.to_string() }
    })
}

fn check(ucp: Library, ucs: Library, library: String) -> Result<Api, LoadError> {
    let from = ManuallyDrop::new(Libraries { ucp, ucs });
    // The version comes first: a function that an old one lacks is not what has to be said of it.
    let name = c"ucp_get_version";
    // SAFETY: this is the signature that ucp.h has declared since 1.0.
    let version = unsafe { symbol::<crate::api::GetVersion>(&from.ucp, name) };
    let version = version.ok_or_else(|| LoadError::MissingFunction {
        library: library.clone(),
        function: "ucp_get_version",
    })?;
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three places to write to, as the function asks for.
    unsafe { version(&raw mut major, &raw mut minor, &raw mut release) };
    if major != 1 || minor < OLDEST_MINOR {
        return Err(LoadError::WrongVersion { library, major, minor });
    }
    Api::resolve(&from, (major, minor, release))
        .map_err(|function| LoadError::MissingFunction { library, function })
}

/// Looks a function up.
///
/// # Safety
///
/// `F` must be the function's type.
pub(crate) unsafe fn symbol<F: Copy>(library: &Library, name: &CStr) -> Option<F> {
    // SAFETY: as promised by the caller.
    unsafe { library.get::<F>(name.to_bytes_with_nul()) }.ok().map(|found| *found)
}

/// A C string for a name or value of UCX's settings; `None` if it holds a zero.
pub fn setting(text: &str) -> Option<CString> {
    CString::new(text).ok()
}
