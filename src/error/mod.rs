//! Errors: what is wrong, where, what there was, what was expected, and what to do.

#[cfg(feature = "candle")]
mod candle;
mod kind;
mod names;
mod tensors;
pub(crate) mod warning;

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

pub use kind::ErrorKind;
pub(crate) use names::{joined, listed, meant, one_of};
pub(crate) use tensors::FLOATS;

/// The result of this crate's functions. With a second argument it is the standard library's: `use
/// optimisers::*` takes nothing away from a program that writes `Result<T, E>`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that this crate refuses, and every failure of a device.
///
/// Bad input is refused before anything is written: after an error from [`update`](crate::update) the model
/// and the state are as they were, unless a device failed
/// [in the middle](crate::update#what-is-left-in-the-middle).
///
/// The [kind](Error::kind) is what a program decides on; the text says what is wrong, where, what was
/// expected, and what to do. `Debug` is the text as well, because a `main` that returns an error, `unwrap`
/// and `expect` print `Debug`; `{:#?}` has the facts by their names.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use optimisers::{AdamW, ErrorKind, setup, update};
///
/// let model = vec![Var::new(&[1f32, 2.0], &Device::Cpu)?];
/// let mut state = setup(AdamW::new(0.1), &model)?;
/// let gradient = Tensor::zeros(3, candle_core::DType::F32, &Device::Cpu)?;
/// let error = update(&mut state, &model, &[("0", gradient)][..]).unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Tensor);
/// assert_eq!((error.path(), error.got(), error.expected()), (Some("0"), Some("[3]"), Some("[2]")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Error(Box<Facts>);

/// What is known of an error.
#[derive(Debug)]
struct Facts {
    kind: ErrorKind,
    /// What is wrong. Empty where the cause says it all.
    problem: Cow<'static, str>,
    got: Option<String>,
    /// Which element of the tensor it is, in row-major order.
    element: Option<usize>,
    expected: Option<String>,
    remedy: Option<Cow<'static, str>>,
    /// The parameter.
    path: Option<String>,
    rank: Option<usize>,
    /// What the file is, and where.
    file: Option<(&'static str, PathBuf)>,
    /// The part of a configuration, such as `[1].AdamW.beta`.
    place: Option<String>,
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Wraps any error, for rules outside this crate.
    ///
    /// ```
    /// let error = optimisers::Error::other("the matrix is singular");
    /// assert_eq!(error.to_string(), "the matrix is singular");
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::new(ErrorKind::Other, "").caused_by(error)
    }

    /// What went wrong, for a program to decide on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The parameter, if it is about one.
    pub fn path(&self) -> Option<&str> {
        self.0.path.as_deref()
    }

    /// The rank that refused, has left, differs, or brought the number that is not finite.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The file.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_ref().map(|(_, file)| file.as_path())
    }

    /// The part of a configuration, such as `[1].AdamW.beta`.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// The element of the tensor, in row-major order.
    pub fn element(&self) -> Option<usize> {
        self.0.element
    }

    /// What there was.
    pub fn got(&self) -> Option<&str> {
        self.0.got.as_deref()
    }

    /// What was expected.
    pub fn expected(&self) -> Option<&str> {
        self.0.expected.as_deref()
    }

    /// What to do.
    pub fn remedy(&self) -> Option<&str> {
        self.0.remedy.as_deref()
    }

    /// An error of this kind. `problem` is a clause that what there was may follow: "the gradient has shape".
    pub(crate) fn new(kind: ErrorKind, problem: impl Into<Cow<'static, str>>) -> Self {
        Error(Box::new(Facts {
            kind,
            problem: problem.into(),
            got: None,
            element: None,
            expected: None,
            remedy: None,
            path: None,
            rank: None,
            file: None,
            place: None,
            cause: None,
        }))
    }

    /// What there was. It stands behind the problem.
    pub(crate) fn with_got(mut self, got: impl fmt::Display) -> Self {
        self.0.got = Some(got.to_string());
        self
    }

    /// Which element of the tensor it is.
    pub(crate) fn at_element(mut self, element: usize) -> Self {
        self.0.element = Some(element);
        self
    }

    /// What was expected.
    pub(crate) fn with_expected(mut self, expected: impl fmt::Display) -> Self {
        self.0.expected = Some(expected.to_string());
        self
    }

    /// What to do. It stands behind a semicolon.
    pub(crate) fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    /// The error behind it, whose text follows the problem.
    pub(crate) fn caused_by(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.cause = Some(cause.into());
        self
    }

    /// The same error with the parameter's path, if it has none yet.
    pub(crate) fn at(mut self, path: &str) -> Self {
        self.0.path.get_or_insert_with(|| path.to_string());
        self
    }

    /// The same error with the rank that it is of.
    pub(crate) fn of_rank(mut self, rank: usize) -> Self {
        self.0.rank = Some(rank);
        self
    }

    /// The same error with the rank that brought the number; the remedy names it too.
    pub(crate) fn brought_by(mut self, rank: usize) -> Self {
        let remedy = self.0.remedy.take().map_or_else(String::new, |remedy| format!("; {remedy}"));
        self.of_rank(rank).with_remedy(format!("rank {rank} brought it{remedy}"))
    }

    /// The same error with the file, if it has none yet. `what` is what the file is to the program:
    /// "checkpoint".
    pub(crate) fn in_file(mut self, what: &'static str, file: &Path) -> Self {
        self.0.file.get_or_insert_with(|| (what, file.to_path_buf()));
        self
    }

    /// The same error with the part of a configuration that it is in, if it has none yet.
    #[cfg(feature = "config")]
    pub(crate) fn in_place(mut self, place: &str) -> Self {
        self.0.place.get_or_insert_with(|| place.to_string());
        self
    }

    /// The same error with what the tensor is to the program, if it is about a tensor's memory.
    pub(crate) fn naming(mut self, name: &str) -> Self {
        if self.0.kind == ErrorKind::Memory {
            self.0.problem = self.0.problem.replacen("the tensor", &format!("the {name}"), 1).into();
        }
        self
    }

    /// The same error for the whole parameter: its element is counted from there, and the part begins at
    /// `first`.
    pub(crate) fn counted_from(mut self, first: usize) -> Self {
        if let Some(element) = &mut self.0.element {
            *element += first;
        }
        self
    }

    /// The same error, which names the leaves that have moved.
    pub(crate) fn after<'p>(mut self, moved: impl Iterator<Item = &'p str>) -> Self {
        let moved = listed(moved);
        if moved.is_empty() {
            return self;
        }
        let remedy = self.0.remedy.take().map_or_else(String::new, |remedy| format!("{remedy}; "));
        self.with_remedy(format!(
            "{remedy}this came up after {} had moved: take model and state from a checkpoint",
            joined(&moved)
        ))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts { problem, got, element, expected, remedy, path, file, place, cause, .. } = &*self.0;
        if let Some((what, file)) = file {
            write!(f, "{what} {}: ", file.display())?;
        }
        match place.as_deref() {
            Some("") => f.write_str("configuration: ")?,
            Some(place) => write!(f, "configuration, at {place}: ")?,
            None => {}
        }
        if let Some(path) = path {
            write!(f, "parameter {path:?}: ")?;
        }
        f.write_str(problem)?;
        if let Some(got) = got {
            write!(f, " {got}")?;
        }
        if let Some(element) = element {
            write!(f, " at element {element}")?;
        }
        if let Some(expected) = expected {
            write!(f, ", expected {expected}")?;
        }
        if let Some(cause) = cause {
            write!(f, "{}{cause}", if problem.is_empty() { "" } else { ": " })?;
        }
        match remedy {
            Some(remedy) => write!(f, "; {remedy}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() { fmt::Debug::fmt(&self.0, f) } else { fmt::Display::fmt(self, f) }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
