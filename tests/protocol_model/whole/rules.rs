//! What must hold, and the questions that several processes ask of shared memory.

use super::members::{Drafter, DrafterLine, LauncherLine, TargetLine};
use super::state::{Mask, Phase, State, UnitState, bit, has, members_of};
use super::{Config, Leftover, Mutant};

/// The unit is settled, or lies where drafters can get at it: no target has to make it.
pub fn needs_no_target(state: &State, unit: usize) -> bool {
    state.ledger[unit].is_settled() || state.slots.iter().any(|slot| slot.carries(unit))
}

/// No unit has to be made any more.
pub fn nothing_needs_a_target(config: &Config, state: &State) -> bool {
    (0..config.all_units()).all(|unit| needs_no_target(state, unit))
}

/// Every training unit is DONE or QUARANTINED.
pub fn all_settled(config: &Config, state: &State) -> bool {
    config
        .training_units()
        .all(|unit| state.ledger[unit].is_settled())
}

/// Drafters may start.
pub fn evaluation_units_are_written(config: &Config, state: &State) -> bool {
    (0..config.evaluation).all(|unit| {
        state.slots[config.slots + unit].phase == Phase::Ready
            || state.ledger[unit].state == UnitState::Quarantined
                && !config.is(Mutant::EvaluationUnitMustBeWritten)
    })
}

/// The units that the ledger has DONE in steps up to `step`.
pub fn units_done_up_to(config: &Config, state: &State, step: u8) -> Mask {
    let done = |unit: &usize| {
        let word = &state.ledger[*unit];
        word.state == UnitState::Done && word.by <= step
    };
    config.training_units().filter(done).map(bit).sum()
}

/// The step whose checkpoint `drafter` wants before its next g1 and before it leaves.
pub fn step_to_save(config: &Config, drafter: &Drafter) -> u8 {
    match config.saves_empty_steps {
        true => drafter.step - 1,
        false => drafter.trained,
    }
}

/// The drafter in `seat` is the lowest member and the checkpoint before its step is missing.
pub fn owes_checkpoint(config: &Config, state: &State, seat: usize) -> bool {
    config.checkpoints
        && state.word.members.trailing_zeros() as usize == seat
        && state.checkpoint.step < step_to_save(config, &state.drafters[seat])
}

/// It owes a checkpoint, and every member shows its c2 done.
pub fn may_checkpoint(config: &Config, state: &State, seat: usize) -> bool {
    let step = step_to_save(config, &state.drafters[seat]);
    owes_checkpoint(config, state, seat)
        && (config.is(Mutant::CheckpointBeforeC2)
            || members_of(state.word.members)
                .all(|member| state.drafters[member].seat.c2_done >= step))
}

/// What is wrong with the step whose last member arrives at g1, if anything is.
pub fn broken_at_reduce(
    config: &Config,
    state: &State,
    step: u8,
    generation: u8,
) -> Option<&'static str> {
    let seats = members_of(state.word.members).map(|member| &state.drafters[member].seat);
    let (mut anchors, mut largest, mut stop) = (0, 0, false);
    for seat in seats {
        stop |= seat.stop;
        for unit in members_of(seat.units) {
            let of_unit = config.anchors_of(unit as u8);
            anchors += of_unit;
            largest = largest.max(of_unit);
        }
    }
    if anchors == 0 {
        return (!stop).then_some("a step without items that nobody asked to stop");
    }
    let budget = &state.budget;
    if (budget.step, budget.generation, budget.anchors) != (step, generation, anchors) {
        return Some("the budget and the step's anchors differ");
    }
    let may_exceed = config.leftover == Leftover::Exceed && generation > 1;
    if anchors - largest >= config.batch && !may_exceed {
        return Some("a step took a unit beyond its budget");
    }
    if anchors < config.batch && !stop && !nothing_needs_a_target(config, state) {
        return Some("a step closed below its budget while units still have to be made");
    }
    None
}

/// The rules of every single state.
pub fn check(config: &Config, state: &State) -> Result<(), String> {
    for unit in 0..config.all_units() {
        let carriers = state.slots.iter().filter(|slot| slot.carries(unit));
        if carriers.count() > 1 {
            return Err(format!("unit {unit} lies in two slots"));
        }
        let word = &state.ledger[unit];
        if word.state == UnitState::Quarantined && word.blamed < config.quarantine {
            return Err(format!(
                "unit {unit} was quarantined after {} deaths of its own",
                word.blamed
            ));
        }
    }
    check_weights(config, state)?;
    check_sentinels(config, state)?;
    check_end(config, state)
}

fn check_weights(config: &Config, state: &State) -> Result<(), String> {
    let drafters = &state.drafters[..config.drafters];
    for (seat, drafter) in drafters.iter().enumerate() {
        if !drafter.has_weights() {
            continue;
        }
        if drafter.line != DrafterLine::Start && !evaluation_units_are_written(config, state) {
            return Err(format!(
                "drafter {seat} started before the evaluation units"
            ));
        }
        let applied = drafter.applied();
        for other in drafters {
            if other.has_weights() && other.applied() == applied && other.weights != drafter.weights
            {
                return Err(format!("two drafters differ after step {applied}"));
            }
        }
        for unit in config.training_units() {
            let word = &state.ledger[unit];
            let trained = has(drafter.weights, unit);
            let fine = match word.state {
                UnitState::Done => trained == (word.by <= applied),
                UnitState::Quarantined => !trained,
                UnitState::Pending | UnitState::Leased => true,
            };
            if !fine {
                return Err(format!(
                    "unit {unit} is {:?} but drafter {seat} {} it",
                    word.state,
                    if trained { "has" } else { "lacks" }
                ));
            }
        }
    }
    Ok(())
}

fn check_sentinels(config: &Config, state: &State) -> Result<(), String> {
    if usize::from(state.finish.published) > config.drafters {
        return Err("more sentinels than drafters were published".into());
    }
    let rolling = matches!(
        state.launcher.line,
        LauncherLine::Roll | LauncherLine::RollFinish
    );
    if state.finish.published > 0 && !rolling && !nothing_needs_a_target(config, state) {
        return Err("the sentinels are out but a unit still has to be made".into());
    }
    Ok(())
}

/// All drafters have left or are gone, and nothing is being recovered.
fn is_over(config: &Config, state: &State) -> bool {
    let drafters = &state.drafters[..config.drafters];
    let left = |line| line == DrafterLine::Left;
    drafters.iter().any(|drafter| left(drafter.line))
        && drafters
            .iter()
            .all(|drafter| left(drafter.line) || drafter.line == DrafterLine::Gone)
        && state.launcher.line == LauncherLine::Idle
        && state
            .targets
            .iter()
            .all(|target| target.line != TargetLine::Dead)
}

/// Whether the run has ended, and as it should have.
pub fn is_right_end(config: &Config, state: &State) -> bool {
    state.launcher.line == LauncherLine::Failed || is_over(config, state)
}

fn check_end(config: &Config, state: &State) -> Result<(), String> {
    if !is_over(config, state) {
        return Ok(());
    }
    let done = units_done_up_to(config, state, u8::MAX);
    if config.checkpoints && state.checkpoint.units != done {
        return Err("the run ended and its last checkpoint lacks trained units".into());
    }
    if state.drafters[..config.drafters]
        .iter()
        .any(|drafter| drafter.line == DrafterLine::Left && drafter.weights != done)
    {
        return Err("the run ended with weights that differ from the ledger".into());
    }
    let stopped = state.finish.stop > 0;
    if !stopped && !all_settled(config, state) {
        return Err("the run ended before all units were done".into());
    }
    let in_use = |slot: &super::state::Slot| slot.phase != Phase::Free;
    if !stopped && state.slots[..config.slots].iter().any(in_use) {
        return Err("the run ended with a slot in use".into());
    }
    Ok(())
}
