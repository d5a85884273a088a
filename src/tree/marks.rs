//! The marks that schedules leave on the hyper-parameters that they drive.

/// The mark of a hyper-parameter whose value a schedule has set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DriveMark {
    /// The index of the field.
    pub(crate) field: usize,
    /// The factor of a relative schedule; `None` for any other.
    pub(crate) factor: Option<f64>,
    /// The leaf's steps when the schedule set the value.
    pub(crate) since: u64,
    pub(crate) course: DriveCourse,
}

/// Where a schedule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DriveCourse {
    /// Its value changes in a later step.
    Moves,
    /// Its value stays as it is from here on, or nobody knows what comes next.
    Rests,
    /// It has ended at a learning rate of 0.
    IsOver,
    /// Nobody knows: a file has the value, and no schedule has gone on since.
    Restored,
}
