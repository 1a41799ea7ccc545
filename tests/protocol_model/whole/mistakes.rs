//! Each planted mistake is found, and so is each reading of the text that does not hold.

use super::sound::{BASE, LIMIT, STEPS, WIDE_STEPS};
use super::{Config, Leave, Leftover, Mutant, Recount, Tags};
use crate::explore::explore;

/// How a mistake shows.
enum Shows {
    /// A rule is broken, named by a part of its text.
    Breaks(&'static str),
    /// A state is reached from which no right end can be.
    Sticks,
}

use Shows::{Breaks, Sticks};

const LOST: Shows = Breaks("lacks it");
const TWICE: Shows = Breaks("applied twice");
const BUDGET_DIFFERS: Shows = Breaks("the budget and the step's anchors differ");
const EMPTY_STEP: &str = "a step without items that nobody asked to stop";
const TOO_EARLY: Shows = Breaks("the sentinels are out but a unit still has to be made");

/// Explores `config` with each mistake.
fn find(mistakes: impl IntoIterator<Item = (Mutant, Config, Shows)>) {
    for (mistake, config, shows) in mistakes {
        let mutant = Some(mistake);
        let verdict = explore(&Config { mutant, ..config }, LIMIT);
        let name = format!("{mistake:?}");
        match shows {
            Breaks(rule) => verdict.expect_broken(&name, rule),
            Sticks => verdict.expect_stuck(&name),
        }
    }
}

/// A step larger than what is left to train, so that only a sentinel closes it.
fn unfilled(config: Config) -> Config {
    Config {
        batch: 2,
        units: 1,
        ..config
    }
}

#[test]
fn in_moving_a_unit() {
    let one_slot = Config { slots: 1, ..BASE };
    find([
        (
            Mutant::PublishBeforePayload,
            BASE,
            Breaks("before its payload was written"),
        ),
        (Mutant::TagOutlivesTheSlot, one_slot, LOST),
        (Mutant::FreeBeforeDone, BASE, TOO_EARLY),
        (Mutant::RedeliverWithoutLedger, STEPS, TWICE),
        (
            Mutant::RequeueWithoutLooking,
            BASE,
            Breaks("lies in two slots"),
        ),
        (
            Mutant::RequeueByStore,
            BASE,
            Breaks("a checkpoint's ledger and its weights differ"),
        ),
        (Mutant::NoR1, one_slot, Sticks),
    ]);
}

#[test]
fn in_tags() {
    let prefetch = Config {
        prefetch: true,
        slots: 3,
        ..STEPS
    };
    let two_deaths = Config { kills: 2, ..STEPS };
    let at_close = Config {
        tags: Tags::AtClose,
        leftover: Leftover::HandBack,
        ..two_deaths
    };
    find([
        (Mutant::NoTag, STEPS, TWICE),
        (Mutant::PrefetchIsTagged, prefetch, LOST),
        (Mutant::RedeliveryKeepsTag, two_deaths, LOST),
        (Mutant::LeftoverKeepsTag, at_close, LOST),
    ]);
}

#[test]
fn in_the_step_word() {
    let no_r5 = Config {
        recount: Recount::ByTheHolder,
        ..STEPS
    };
    let stop = Config {
        stop: true,
        ..STEPS
    };
    find([
        (Mutant::RecoveryBeforeR0, STEPS, TWICE),
        (Mutant::R6BeforeR2, STEPS, LOST),
        (
            Mutant::RecordAfterG1,
            STEPS,
            Breaks("a seat in REDUCE is of another step"),
        ),
        (Mutant::GenerationNotRaised, no_r5, Breaks(EMPTY_STEP)),
        (Mutant::AbortTestedFirst, STEPS, Sticks),
        (Mutant::CloseWithoutItems, STEPS, Breaks(EMPTY_STEP)),
        (Mutant::StaysInGather, stop, Sticks),
        (Mutant::LeavesItsG1, stop, Sticks),
        (Mutant::StopNotAgreed, Config { kills: 0, ..stop }, Sticks),
    ]);
}

#[test]
fn in_the_budget() {
    let wide = Config { batch: 2, ..STEPS };
    let prefetch = Config {
        prefetch: true,
        slots: 3,
        ..STEPS
    };
    let unstamped = Config {
        recount: Recount::Unstamped,
        tags: Tags::AtClose,
        ..STEPS
    };
    find([
        (Mutant::LostReservationIsKept, wide, BUDGET_DIFFERS),
        (
            Mutant::GiveBackToAnyGeneration,
            wide,
            Breaks("more anchors were given back than reserved"),
        ),
        (Mutant::BudgetNotReset, STEPS, BUDGET_DIFFERS),
        (Mutant::GrowthWithoutR5, unstamped, BUDGET_DIFFERS),
        (Mutant::PrefetchIsNotReserved, prefetch, BUDGET_DIFFERS),
    ]);
}

/// RING.md to the letter: a survivor keeps its items and r5 counts what is tagged. An item taken but not
/// tagged when r5 passes is in the step without being in its budget.
#[test]
fn in_counting_only_tagged_items() {
    for config in [STEPS, WIDE_STEPS] {
        for tags in [Tags::AtOnce, Tags::AtClose] {
            let recount = Recount::Unstamped;
            explore(
                &Config {
                    recount,
                    tags,
                    ..config
                },
                LIMIT,
            )
            .expect_broken(
                "items taken but not tagged",
                "the budget and the step's anchors differ",
            );
        }
    }
}

/// Both drafters close an empty step because of a stop, and a target's death settles the last unit. One makes
/// its g2 and leaves; the other's g2 then commits the step, and it waits for a checkpoint of that step, which
/// the lowest member, having left, will never write.
#[test]
fn in_waiting_for_the_checkpoint_of_an_empty_step() {
    let config = Config {
        leave: Leave::FromAnyWait,
        saves_empty_steps: true,
        units: 1,
        stop: true,
        quarantine: 1,
        ..BASE
    };
    explore(&config, LIMIT).expect_stuck("waiting for an empty step's checkpoint");
}

#[test]
fn in_finish() {
    let one_drafter = Config {
        drafters: 1,
        ..BASE
    };
    let two_targets = Config {
        targets: 2,
        ..one_drafter
    };
    find([
        (Mutant::FinishCountsLeased, two_targets, TOO_EARLY),
        (
            Mutant::SentinelsAreAdded,
            two_targets,
            Breaks("more sentinels than drafters"),
        ),
        (Mutant::NobodyHelpsToPublish, unfilled(two_targets), Sticks),
        (Mutant::SentinelInOwnMemory, unfilled(STEPS), Sticks),
        (
            Mutant::LeavesOnSentinel,
            STEPS,
            Breaks("the run ended before all units were done"),
        ),
    ]);
}

#[test]
fn in_a_roll_back() {
    let one_drafter = Config {
        drafters: 1,
        kills: 2,
        ..BASE
    };
    let two_targets = Config {
        targets: 2,
        ..unfilled(one_drafter)
    };
    let two_drafters = Config {
        kills: 2,
        units: 1,
        ..BASE
    };
    find([
        (Mutant::FinishWithoutEpoch, one_drafter, TOO_EARLY),
        (Mutant::PublishWithoutEpoch, one_drafter, TOO_EARLY),
        (Mutant::FinishClearedFirst, one_drafter, TOO_EARLY),
        (Mutant::SentinelsOutliveRoll, one_drafter, TOO_EARLY),
        (Mutant::RollForgetsGivenUp, two_targets, Sticks),
        (
            Mutant::C2DoneOutlivesRoll,
            two_drafters,
            Breaks("a checkpoint's ledger and its weights differ"),
        ),
    ]);
}

#[test]
fn in_members_that_come_and_go() {
    let checkpoints = Config {
        checkpoints: true,
        ..STEPS
    };
    find([
        (
            Mutant::NewcomerSkipsWeights,
            STEPS,
            Breaks("two drafters differ"),
        ),
        (
            Mutant::WeightsOfAnyMember,
            STEPS,
            Breaks("two drafters differ"),
        ),
        (Mutant::NewcomerOwesC2, checkpoints, Sticks),
        (Mutant::NewcomerLeavesAsMember, checkpoints, Sticks),
        (
            Mutant::CheckpointBeforeC2,
            checkpoints,
            Breaks("a checkpoint's ledger and its weights differ"),
        ),
        (
            Mutant::LeaveBeforeCheckpoint,
            checkpoints,
            Breaks("its last checkpoint lacks trained units"),
        ),
    ]);
}

#[test]
fn in_quarantine_and_evaluation_units() {
    let evaluation = Config {
        evaluation: 1,
        drafters: 1,
        ..BASE
    };
    let quarantine = Config {
        quarantine: 1,
        ..BASE
    };
    find([
        (
            Mutant::RerunCountsAgain,
            Config {
                quarantine: 2,
                reruns: 1,
                ..STEPS
            },
            Breaks("was quarantined after 1 deaths"),
        ),
        (
            Mutant::QuarantinesPublishedUnit,
            quarantine,
            Breaks("is Quarantined but drafter 0 has it"),
        ),
        (
            Mutant::StartsEarly,
            evaluation,
            Breaks("started before the evaluation units"),
        ),
        (Mutant::EvaluationSlotsOverlooked, evaluation, Sticks),
        (
            Mutant::EvaluationUnitMustBeWritten,
            Config {
                quarantine: 1,
                ..evaluation
            },
            Sticks,
        ),
    ]);
}
