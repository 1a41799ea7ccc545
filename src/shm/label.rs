//! Names of the protocol's lines, and a hook that is called before each of them.
//!
//! A test installs a hook that kills the process at a chosen label, so that "a kill may come before any
//! line" is exercised on the real code. Without a hook a label costs one relaxed load.

use std::sync::OnceLock;

/// One line of the protocol; the hook runs before its shared access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(
    missing_docs,
    reason = "the protocol's own labels, listed in the module overview"
)]
pub enum Label {
    P0,
    P1,
    P2,
    P3,
    P4,
    /// A drafter reserves a unit's anchors in the step's budget.
    Reserve,
    C0,
    /// A drafter gives a reservation back after losing c0.
    GiveBack,
    C0t,
    C1,
    C2,
    C3,
    /// A drafter writes its seat's record before g1.
    Record,
    G1,
    G2,
    /// A drafter adopts a new generation.
    Join,
    /// A target sets its finish bit.
    FinishBit,
    /// The sentinels are published.
    Publish,
    /// A drafter takes its sentinel.
    Sentinel,
    /// A newcomer has received weights, moments and position.
    Received,
    /// The death of a seat is counted against its current unit.
    Count,
    R0,
    R1,
    R2,
    R3,
    R4,
    R5,
    R6,
}

impl Label {
    /// Every label, in protocol order.
    pub const ALL: [Label; 28] = [
        Label::P0,
        Label::P1,
        Label::P2,
        Label::P3,
        Label::P4,
        Label::Reserve,
        Label::C0,
        Label::GiveBack,
        Label::C0t,
        Label::C1,
        Label::C2,
        Label::C3,
        Label::Record,
        Label::G1,
        Label::G2,
        Label::Join,
        Label::FinishBit,
        Label::Publish,
        Label::Sentinel,
        Label::Received,
        Label::Count,
        Label::R0,
        Label::R1,
        Label::R2,
        Label::R3,
        Label::R4,
        Label::R5,
        Label::R6,
    ];

    /// The label as text, for example `P0` or `C0t`.
    pub fn name(self) -> String {
        format!("{self:?}")
    }

    /// The label of that name, ignoring case.
    pub fn from_name(name: &str) -> Option<Label> {
        Label::ALL
            .into_iter()
            .find(|label| label.name().eq_ignore_ascii_case(name))
    }
}

static HOOK: OnceLock<Box<dyn Fn(Label) + Send + Sync>> = OnceLock::new();

/// Installs the hook of this process; returns false when one was installed before (it stays).
pub fn install_label_hook(hook: impl Fn(Label) + Send + Sync + 'static) -> bool {
    HOOK.set(Box::new(hook)).is_ok()
}

/// Called before the shared access of the line `line`.
#[inline]
pub(crate) fn label(line: Label) {
    if let Some(hook) = HOOK.get() {
        hook(line);
    }
}
