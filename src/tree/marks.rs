//! The marks that schedules leave on the hyper-parameters that they drive.

/// What says that a hyper-parameter is driven: its value is what a schedule has made of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DriveMark {
    /// The index of the field.
    pub(crate) field: usize,
    /// What a relative schedule says; `None` of one that is not relative.
    pub(crate) factor: Option<f64>,
    /// The steps of the leaf when the schedule set the value.
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
}
