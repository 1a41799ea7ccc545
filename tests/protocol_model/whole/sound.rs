//! The protocol without mistakes: every size and every choice that the text leaves open is explored whole.

use std::cell::RefCell;
use std::collections::HashSet;

use super::state::State;
use super::{Config, Leave, Leftover, Recount, Tags};
use crate::explore::{Model, Steps, Verdict, explore};

/// More states than any exploration here has.
pub const LIMIT: usize = 60_000_000;

/// One target, two drafters, two units, one unit per step, one death, one replacement.
pub const BASE: Config = Config {
    targets: 1,
    drafters: 2,
    slots: 2,
    units: 2,
    evaluation: 0,
    anchors: [1; 4],
    batch: 1,
    prefetch: false,
    checkpoints: true,
    saves_empty_steps: false,
    stop: false,
    quarantine: 0,
    kills: 1,
    respawns: 1,
    reruns: 0,
    tags: Tags::AtOnce,
    recount: Recount::Stamped,
    leftover: Leftover::Exceed,
    leave: Leave::TakesG1Back,
    mutant: None,
};

/// Drafters alone, with all units in slots from the start.
pub const STEPS: Config = Config {
    targets: 0,
    checkpoints: false,
    ..BASE
};

/// Drafters alone, with steps of two units.
pub const WIDE_STEPS: Config = Config {
    units: 3,
    slots: 3,
    batch: 2,
    ..STEPS
};

/// Everything at once, with one target.
pub const WHOLE: Config = Config {
    evaluation: 1,
    slots: 3,
    prefetch: true,
    stop: true,
    quarantine: 1,
    ..BASE
};

/// Explores `config` whole; it must be sound and have more than `minimum` states.
fn check(name: &str, minimum: usize, config: Config) {
    explore(&config, LIMIT).expect_clean(name, minimum);
}

/// The model without the sorting of targets and slots; keeps the sorted form of every state it meets.
struct Unsorted {
    config: Config,
    sorted: RefCell<HashSet<[u64; 6]>>,
}

impl Model for Unsorted {
    type State = State;
    type Key = [u64; 6];

    fn initial(&self) -> State {
        self.config.initial()
    }

    fn pack(&self, state: &State) -> [u64; 6] {
        self.config.write(self.config.at_shared_lines(state))
    }

    fn unpack(&self, key: &[u64; 6]) -> State {
        self.config.unpack(key)
    }

    fn steps(&self, state: &State, out: &mut Steps<State>) {
        self.config.steps(state, out);
    }

    fn check(&self, state: &State) -> Result<(), String> {
        self.sorted.borrow_mut().insert(self.config.pack(state));
        self.config.check(state)
    }

    fn is_right_end(&self, state: &State) -> bool {
        self.config.is_right_end(state)
    }
}

/// Sorting leaves exactly one of each set of states that differ in names, and loses none.
#[test]
fn sorting_loses_no_state() {
    let config = Config {
        targets: 2,
        evaluation: 1,
        units: 1,
        prefetch: true,
        ..BASE
    };
    let unsorted = Unsorted {
        config,
        sorted: RefCell::default(),
    };
    let (Verdict::Clean(all), Verdict::Clean(sorted)) =
        (explore(&unsorted, LIMIT), explore(&config, LIMIT))
    else {
        panic!("both explorations are clean");
    };
    assert_eq!(unsorted.sorted.borrow().len(), sorted.states);
    assert!(all.states > 2 * sorted.states, "{all:?} against {sorted:?}");
    println!("{} states, {} of them sorted", all.states, sorted.states);
}

#[test]
fn drafters_alone() {
    let two_deaths = Config {
        kills: 2,
        stop: true,
        ..STEPS
    };
    check("two deaths and a stop", 300_000, two_deaths);
    let three = Config {
        drafters: 3,
        respawns: 0,
        ..STEPS
    };
    check("three drafters", 200_000, three);
}

/// The text leaves open when an item is tagged, who counts the items of survivors, and what becomes of those
/// that find no room: all of these hold.
#[test]
fn every_way_to_count_items_after_an_abort() {
    let uneven = Config {
        anchors: [1, 2, 1, 0],
        ..WIDE_STEPS
    };
    for leftover in [Leftover::Exceed, Leftover::HandBack, Leftover::Keep] {
        for (tags, recount) in [
            (Tags::AtOnce, Recount::Stamped),
            (Tags::AtClose, Recount::Stamped),
            (Tags::AtClose, Recount::ByTheHolder),
        ] {
            let config = Config {
                tags,
                recount,
                leftover,
                ..uneven
            };
            let name = format!("{tags:?}, {recount:?}, {leftover:?}");
            check(&name, 50_000, config);
        }
    }
}

#[test]
fn two_targets_and_two_drafters() {
    let config = Config { targets: 2, ..BASE };
    check("two targets and two drafters", 800_000, config);
}

#[test]
fn everything_at_once_with_one_target() {
    check("everything, one target", 1_500_000, WHOLE);
}

/// With a stop, steps may be empty; a death may settle the last unit while drafters are in one.
#[test]
fn every_way_to_leave_an_empty_step() {
    for (leave, saves_empty_steps) in [
        (Leave::TakesG1Back, false),
        (Leave::TakesG1Back, true),
        (Leave::FromAnyWait, false),
    ] {
        let config = Config {
            leave,
            saves_empty_steps,
            units: 1,
            stop: true,
            quarantine: 1,
            ..BASE
        };
        let name = format!("{leave:?}, saves empty steps: {saves_empty_steps}");
        check(&name, 100_000, config);
    }
}

#[test]
fn all_drafters_dead() {
    let two_drafters = Config {
        kills: 2,
        respawns: 0,
        ..BASE
    };
    check("both drafters dead", 200_000, two_drafters);
    let two_targets = Config {
        targets: 2,
        drafters: 1,
        kills: 2,
        ..BASE
    };
    check("the only drafter dead", 200_000, two_targets);
}

#[test]
fn two_deaths_of_any_kind_with_a_stop_and_quarantine() {
    let config = Config {
        units: 1,
        kills: 2,
        stop: true,
        quarantine: 1,
        ..BASE
    };
    check("two deaths, a stop, quarantine", 700_000, config);
}

#[test]
fn a_recovery_that_begins_again() {
    let config = Config {
        reruns: 1,
        quarantine: 2,
        units: 1,
        ..BASE
    };
    check("a recovery begun again", 100_000, config);
}

#[test]
#[ignore = "minutes and gigabytes"]
fn everything_at_once_with_two_targets() {
    let config = Config {
        targets: 2,
        ..WHOLE
    };
    check("everything, two targets", 25_000_000, config);
}

#[test]
#[ignore = "minutes and gigabytes"]
fn larger_sizes() {
    let three_drafters = Config {
        drafters: 3,
        ..STEPS
    };
    check("three drafters, one replaced", 2_000_000, three_drafters);
    let four_units = Config {
        units: 4,
        slots: 4,
        batch: 2,
        prefetch: true,
        ..BASE
    };
    check("four units", 8_000_000, four_units);
    let roll_back = Config {
        targets: 2,
        drafters: 1,
        kills: 2,
        evaluation: 1,
        quarantine: 1,
        stop: true,
        ..BASE
    };
    check("roll-back with everything", 7_000_000, roll_back);
}
