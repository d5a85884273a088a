//! Errors, made of facts: what is wrong, where, what was found, what was expected, and what to do.
//!
//! All texts have the facts in this order, without the facts that an error lacks. A rank is named in the
//! problem or in the remedy.
//!
//! ```text
//! checkpoint {file}: configuration, at {place}: parameter {path}: {role}: {problem} {got} at element
//! {element}, expected {expected}: {cause}; {remedy}
//! ```

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
pub(crate) use names::{comma_separated, distinct, first_names, one_of, suggestion};
pub(crate) use tensors::FLOATS;

/// The result of this crate's functions. `Result<T, E>` is the standard library's type, so that code with its
/// own error type still compiles after `use optimisers::*`.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The error of this crate: refused input, or a device, file or rank that fails.
///
/// Bad input is refused before anything is written: after an error from [`update`](crate::update) the model
/// and the state are as they were, unless a device failed
/// [in the middle](crate::update#what-is-left-in-the-middle).
///
/// A program decides by the [kind](Error::kind). The text has the problem, the place, the expectation and the
/// remedy. `Debug` prints the text of `Display`, because `unwrap`, `expect` and a `main` that returns an
/// error use `Debug`. `{:#?}` prints the facts by name.
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

/// The facts of an error.
#[derive(Debug)]
struct Facts {
    kind: ErrorKind,
    /// What is wrong. Empty if `cause` has the whole text.
    problem: Cow<'static, str>,
    got: Option<String>,
    element: Option<usize>,
    expected: Option<String>,
    remedy: Option<Cow<'static, str>>,
    /// The path of the parameter.
    path: Option<String>,
    /// The role of the tensor in the program ("gradient"), if the error is about the tensor's memory.
    role: Option<&'static str>,
    rank: Option<usize>,
    /// The kind of file ("checkpoint"), and its path.
    file: Option<(&'static str, PathBuf)>,
    place: Option<String>,
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Wraps any error, for rules from outside of this crate.
    ///
    /// ```
    /// let error = optimisers::Error::other("the matrix is singular");
    /// assert_eq!(error.to_string(), "the matrix is singular");
    /// ```
    pub fn other(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Error::new(ErrorKind::Other, "").caused_by(error)
    }

    /// The kind of error, for a program to decide on.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The path of the parameter, if the error is about a parameter.
    pub fn path(&self) -> Option<&str> {
        self.0.path.as_deref()
    }

    /// The rank that refused, left or differs, or whose gradient is not finite.
    pub fn rank(&self) -> Option<usize> {
        self.0.rank
    }

    /// The path of the file.
    pub fn file(&self) -> Option<&Path> {
        self.0.file.as_ref().map(|(_, file)| file.as_path())
    }

    /// The part of a configuration, such as `[1].AdamW.beta`.
    pub fn place(&self) -> Option<&str> {
        self.0.place.as_deref()
    }

    /// The index of the element, in row-major order.
    pub fn element(&self) -> Option<usize> {
        self.0.element
    }

    /// What was found.
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

    /// An error of this kind. `problem` is a clause that `with_got` may complete: "the gradient has shape".
    pub(crate) fn new(kind: ErrorKind, problem: impl Into<Cow<'static, str>>) -> Self {
        Error(Box::new(Facts {
            kind,
            problem: problem.into(),
            got: None,
            element: None,
            expected: None,
            remedy: None,
            path: None,
            role: None,
            rank: None,
            file: None,
            place: None,
            cause: None,
        }))
    }

    /// Adds what was found, which follows the problem in the text.
    pub(crate) fn with_got(mut self, got: impl fmt::Display) -> Self {
        self.0.got = Some(got.to_string());
        self
    }

    pub(crate) fn at_element(mut self, element: usize) -> Self {
        self.0.element = Some(element);
        self
    }

    pub(crate) fn with_expected(mut self, expected: impl fmt::Display) -> Self {
        self.0.expected = Some(expected.to_string());
        self
    }

    /// Adds what to do, which follows a semicolon at the end of the text.
    pub(crate) fn with_remedy(mut self, remedy: impl Into<Cow<'static, str>>) -> Self {
        self.0.remedy = Some(remedy.into());
        self
    }

    fn with_problem(mut self, problem: &'static str) -> Self {
        self.0.problem = problem.into();
        self
    }

    /// Adds the underlying error, whose text follows the problem.
    pub(crate) fn caused_by(mut self, cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.cause = Some(cause.into());
        self
    }

    /// Adds the parameter's path, unless the error has one: inner code sets the more precise path first.
    pub(crate) fn at(mut self, path: &str) -> Self {
        self.0.path.get_or_insert_with(|| path.to_string());
        self
    }

    pub(crate) fn of_rank(mut self, rank: usize) -> Self {
        self.0.rank = Some(rank);
        self
    }

    /// Adds the rank whose gradient has the offending number, and names the rank in the remedy.
    pub(crate) fn caused_by_rank(mut self, rank: usize) -> Self {
        let remedy = self
            .0
            .remedy
            .take()
            .map_or_else(String::new, |remedy| format!("; {remedy}"));
        self.of_rank(rank)
            .with_remedy(format!("the cause is the gradient of rank {rank}{remedy}"))
    }

    /// Adds the file, unless the error has one. `kind` is the kind of file: "checkpoint".
    pub(crate) fn in_file(mut self, kind: &'static str, file: &Path) -> Self {
        self.0.file.get_or_insert_with(|| (kind, file.to_path_buf()));
        self
    }

    /// Adds the part of the configuration, unless the error has one.
    #[cfg(feature = "config")]
    pub(crate) fn in_place(mut self, place: &str) -> Self {
        self.0.place.get_or_insert_with(|| place.to_string());
        self
    }

    /// Adds the role of the tensor, if the error is about memory and has no role yet: the code that lends
    /// memory does not know the role. Errors of other kinds come from the function that ran on the memory.
    pub(crate) fn in_role(mut self, role: &'static str) -> Self {
        if self.0.kind == ErrorKind::Memory {
            self.0.role.get_or_insert(role);
        }
        self
    }

    /// Turns an element's index in a part of a parameter into the index in the whole parameter. `first` is
    /// the first element of the part.
    pub(crate) fn counted_from(mut self, first: usize) -> Self {
        if let Some(element) = &mut self.0.element {
            *element += first;
        }
        self
    }

    /// Adds to the remedy the leaves that have moved before the error, if there are any.
    pub(crate) fn after<'p>(mut self, moved_paths: impl Iterator<Item = &'p str>) -> Self {
        let names = first_names(moved_paths);
        if names.is_empty() {
            return self;
        }
        let remedy = self
            .0
            .remedy
            .take()
            .map_or_else(String::new, |remedy| format!("{remedy}; "));
        self.with_remedy(format!(
            "{remedy}these parameters had already moved: {}; restore model and state from a checkpoint",
            comma_separated(&names)
        ))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Facts {
            problem,
            got,
            element,
            expected,
            remedy,
            path,
            role,
            file,
            place,
            cause,
            ..
        } = &*self.0;
        if let Some((file_kind, file)) = file {
            write!(f, "{file_kind} {}: ", file.display())?;
        }
        match place.as_deref() {
            Some("") => f.write_str("configuration: ")?,
            Some(place) => write!(f, "configuration, at {place}: ")?,
            None => {}
        }
        if let Some(path) = path {
            write!(f, "parameter {path:?}: ")?;
        }
        if let Some(role) = role {
            write!(f, "{role}: ")?;
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
        if f.alternate() {
            fmt::Debug::fmt(&self.0, f)
        } else {
            fmt::Display::fmt(self, f)
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.cause.as_deref().map(|cause| cause as _)
    }
}
