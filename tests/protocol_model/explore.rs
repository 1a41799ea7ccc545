//! A small explicit-state explorer: breadth first, every state visited once, so a broken rule comes with a
//! shortest trace to it.
//!
//! Two questions are asked of a model. *Safety*: does every reachable state, and every access on the way,
//! obey the rules? *Liveness*: can a right end be reached from every state **without another fault**? Kills
//! and requests from outside are marked as faults and never count as a way out, so a deadlock that only one
//! more death would resolve is still reported.

use std::fmt;

/// A packed state. Equal states must pack to equal keys.
pub trait Key: Copy + Eq + Default + AsRef<[u64]> {}
impl<const N: usize> Key for [u64; N] where [u64; N]: Default {}

/// One protocol, with bounds that keep it finite.
pub trait Model {
    /// The readable form of a state.
    type State: Clone;
    /// The stored form of a state.
    type Key: Key;

    /// The state every run starts from.
    fn initial(&self) -> Self::State;
    /// The stored form of `state`; may drop what no later access can read.
    fn pack(&self, state: &Self::State) -> Self::Key;
    /// The inverse of [`Model::pack`].
    fn unpack(&self, key: &Self::Key) -> Self::State;
    /// Adds every access that some process may make next.
    fn steps(&self, state: &Self::State, out: &mut Steps<Self::State>);
    /// The rules that hold in every state; the error says which one is broken.
    fn check(&self, state: &Self::State) -> Result<(), String>;
    /// Whether the run has ended as it should.
    fn is_right_end(&self, state: &Self::State) -> bool;
}

/// Who makes an access and which line of the protocol it is.
#[derive(Clone, Copy, Debug)]
pub struct Label {
    actor: &'static str,
    seat: u8,
    line: &'static str,
    item: Option<u8>,
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} {}", self.actor, self.seat, self.line)?;
        match self.item {
            Some(item) => write!(f, " #{item}"),
            None => Ok(()),
        }
    }
}

/// Builds a label: the actor with its seat, the protocol line, and the slot or unit concerned.
pub fn label(
    actor: &'static str,
    seat: usize,
    line: &'static str,
    item: impl Into<Option<usize>>,
) -> Label {
    Label {
        actor,
        seat: seat as u8,
        line,
        item: item.into().map(|item| item as u8),
    }
}

/// The accesses possible in one state, filled by [`Model::steps`].
pub struct Steps<S> {
    next: Vec<Next<S>>,
}

struct Next<S> {
    label: Label,
    fault: bool,
    state: Result<S, String>,
}

impl<S> Steps<S> {
    fn new() -> Self {
        Self { next: Vec::new() }
    }

    /// An access of the protocol.
    pub fn step(&mut self, label: Label, state: S) {
        self.next.push(Next {
            label,
            fault: false,
            state: Ok(state),
        });
    }

    /// Something done to the protocol from outside: a kill, a request to stop.
    pub fn fault(&mut self, label: Label, state: S) {
        self.next.push(Next {
            label,
            fault: true,
            state: Ok(state),
        });
    }

    /// An access that the protocol must never make.
    pub fn violation(&mut self, label: Label, rule: impl Into<String>) {
        self.next.push(Next {
            label,
            fault: false,
            state: Err(rule.into()),
        });
    }
}

/// What an exploration found.
#[derive(Debug)]
pub enum Verdict {
    /// Every state obeys the rules and can reach a right end.
    Clean(Size),
    /// A rule is broken at the end of the trace.
    Broken(Counterexample),
    /// From the end of the trace no right end can be reached any more.
    Stuck(Counterexample),
    /// The bound on the number of states was met first.
    TooLarge(Size),
}

/// How much was explored.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Distinct states.
    pub states: usize,
    /// Accesses between them.
    pub accesses: usize,
    /// States that are right ends.
    pub right_ends: usize,
}

/// A shortest run to a state that must not be.
#[derive(Debug)]
pub struct Counterexample {
    /// What is wrong there.
    pub rule: String,
    /// The accesses from the start.
    pub trace: Vec<Label>,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, after {} accesses:", self.rule, self.trace.len())?;
        for label in &self.trace {
            writeln!(f, "    {label}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Clean(size) => write!(f, "clean: {size:?}"),
            Verdict::Broken(found) => write!(f, "rule broken: {found}"),
            Verdict::Stuck(found) => write!(f, "no right end reachable: {found}"),
            Verdict::TooLarge(size) => write!(f, "too large: {size:?}"),
        }
    }
}

impl Verdict {
    /// Asserts a clean exploration of at least `minimum` states, so that a model which explores nothing
    /// cannot pass.
    pub fn expect_clean(&self, name: &str, minimum: usize) {
        match self {
            Verdict::Clean(size) => {
                println!("{name}: {size:?}");
                assert!(
                    size.states > minimum && size.right_ends > 0,
                    "{name}: only {size:?}, expected more than {minimum} states and a right end"
                );
            }
            other => panic!("{name}: {other}"),
        }
    }

    /// Asserts that a rule was found broken whose description contains `rule`.
    pub fn expect_broken(&self, name: &str, rule: &str) {
        match self {
            Verdict::Broken(found) if found.rule.contains(rule) => {
                println!("{name}: {found}");
            }
            other => panic!("{name}: expected a broken rule naming {rule:?}, got {other}"),
        }
    }

    /// Asserts that some state was found from which no right end can be reached.
    pub fn expect_stuck(&self, name: &str) {
        match self {
            Verdict::Stuck(found) => println!("{name}: {found}"),
            other => panic!("{name}: expected a state without a way out, got {other}"),
        }
    }
}

/// Explores every state of `model`, at most `limit` of them.
pub fn explore<M: Model>(model: &M, limit: usize) -> Verdict {
    Explorer::new(model).run(limit)
}

const NO_STATE: u32 = u32::MAX;

struct Explorer<'m, M: Model> {
    model: &'m M,
    seen: Seen<M::Key>,
    /// The state each one was first reached from.
    parent: Vec<u32>,
    /// `ways[first_way[i]..first_way[i + 1]]` are the states one access after state `i`, faults left out.
    ways: Vec<u32>,
    first_way: Vec<u32>,
    right_ends: Vec<u32>,
}

impl<'m, M: Model> Explorer<'m, M> {
    fn new(model: &'m M) -> Self {
        Self {
            model,
            seen: Seen::new(),
            parent: Vec::new(),
            ways: Vec::new(),
            first_way: vec![0],
            right_ends: Vec::new(),
        }
    }

    fn run(mut self, limit: usize) -> Verdict {
        let initial = self.model.initial();
        if let Err(rule) = self.model.check(&initial) {
            return Verdict::Broken(Counterexample {
                rule,
                trace: Vec::new(),
            });
        }
        self.seen.insert(self.model.pack(&initial));
        self.parent.push(NO_STATE);

        let mut steps = Steps::new();
        let mut accesses = 0;
        let mut at = 0;
        while at < self.seen.len() {
            if self.seen.len() > limit {
                return Verdict::TooLarge(self.size(accesses));
            }
            let state = self.model.unpack(self.seen.key(at));
            if self.model.is_right_end(&state) {
                self.right_ends.push(at as u32);
            }
            steps.next.clear();
            self.model.steps(&state, &mut steps);
            accesses += steps.next.len();
            for next in steps.next.drain(..) {
                let reached = next.state.and_then(|state| {
                    let (index, new) = self.seen.insert(self.model.pack(&state));
                    if new {
                        self.parent.push(at as u32);
                        self.model.check(&state)?;
                    }
                    Ok(index)
                });
                match reached {
                    Ok(index) if !next.fault => self.ways.push(index),
                    Ok(_) => {}
                    Err(rule) => {
                        let mut trace = self.trace(at);
                        trace.push(next.label);
                        return Verdict::Broken(Counterexample { rule, trace });
                    }
                }
            }
            self.first_way.push(self.ways.len() as u32);
            at += 1;
        }
        self.verdict_on_liveness(accesses)
    }

    fn verdict_on_liveness(self, accesses: usize) -> Verdict {
        let can_end = self.states_that_can_end();
        let stuck = can_end.iter().filter(|can| !**can).count();
        match can_end.iter().position(|can| !can) {
            None => Verdict::Clean(self.size(accesses)),
            Some(at) => Verdict::Stuck(Counterexample {
                rule: format!(
                    "{stuck} of {} states have no way to a right end",
                    can_end.len()
                ),
                trace: self.trace(at),
            }),
        }
    }

    /// Walks all accesses backwards from the right ends.
    fn states_that_can_end(&self) -> Vec<bool> {
        let states = self.seen.len();
        let mut first_back = vec![0_u32; states + 1];
        for &to in &self.ways {
            first_back[to as usize + 1] += 1;
        }
        for at in 0..states {
            first_back[at + 1] += first_back[at];
        }
        let mut fill = first_back.clone();
        let mut back = vec![0_u32; self.ways.len()];
        for from in 0..states {
            for way in self.first_way[from]..self.first_way[from + 1] {
                let place = &mut fill[self.ways[way as usize] as usize];
                back[*place as usize] = from as u32;
                *place += 1;
            }
        }

        let mut can_end = vec![false; states];
        let mut open = self.right_ends.clone();
        for &end in &open {
            can_end[end as usize] = true;
        }
        while let Some(at) = open.pop() {
            let (first, last) = (first_back[at as usize], first_back[at as usize + 1]);
            for &from in &back[first as usize..last as usize] {
                if !std::mem::replace(&mut can_end[from as usize], true) {
                    open.push(from);
                }
            }
        }
        can_end
    }

    fn size(&self, accesses: usize) -> Size {
        Size {
            states: self.seen.len(),
            accesses,
            right_ends: self.right_ends.len(),
        }
    }

    /// The labels from the start to state `at`, found again by repeating each access.
    fn trace(&self, at: usize) -> Vec<Label> {
        let mut trace = Vec::new();
        let mut to = at;
        while self.parent[to] != NO_STATE {
            let from = self.parent[to] as usize;
            let mut steps = Steps::new();
            let state = self.model.unpack(self.seen.key(from));
            self.model.steps(&state, &mut steps);
            let step = steps.next.into_iter().find(|step| {
                matches!(&step.state, Ok(state) if self.model.pack(state) == *self.seen.key(to))
            });
            trace.push(
                step.expect("the access that first reached a state can be repeated")
                    .label,
            );
            to = from;
        }
        trace.reverse();
        trace
    }
}

/// The set of visited states, numbered in the order of their first visit.
struct Seen<K> {
    keys: Vec<K>,
    /// Open addressing into `keys`; a power of two long, at most half full.
    table: Vec<u32>,
}

impl<K: Key> Seen<K> {
    fn new() -> Self {
        Self {
            keys: Vec::new(),
            table: vec![NO_STATE; 1 << 12],
        }
    }

    fn len(&self) -> usize {
        self.keys.len()
    }

    fn key(&self, index: usize) -> &K {
        &self.keys[index]
    }

    /// The number of `key`, and whether it is new.
    fn insert(&mut self, key: K) -> (u32, bool) {
        if self.keys.len() * 2 >= self.table.len() {
            self.grow();
        }
        let place = self.place(&key);
        if self.table[place] != NO_STATE {
            return (self.table[place], false);
        }
        let index = self.keys.len() as u32;
        self.table[place] = index;
        self.keys.push(key);
        (index, true)
    }

    fn place(&self, key: &K) -> usize {
        let mask = self.table.len() - 1;
        let mut place = hash(key.as_ref()) as usize & mask;
        while self.table[place] != NO_STATE && self.keys[self.table[place] as usize] != *key {
            place = (place + 1) & mask;
        }
        place
    }

    fn grow(&mut self) {
        self.table = vec![NO_STATE; self.table.len() * 2];
        for index in 0..self.keys.len() {
            let place = self.place(&self.keys[index]);
            self.table[place] = index as u32;
        }
    }
}

/// Multiply and fold, 64 bits at a time: states differ in few bits, so every bit must spread.
fn hash(words: &[u64]) -> u64 {
    let mut hash = 0_u64;
    for word in words {
        let wide = u128::from(hash ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        hash = (wide as u64) ^ ((wide >> 64) as u64);
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter that may go up by one or two to `last`, and may be broken or left without a way on.
    struct Counter {
        forbidden: Option<u8>,
        dead_end: Option<u8>,
        fault_from: Option<u8>,
    }

    impl Model for Counter {
        type State = u8;
        type Key = [u64; 1];

        fn initial(&self) -> u8 {
            0
        }

        fn pack(&self, state: &u8) -> [u64; 1] {
            [u64::from(*state)]
        }

        fn unpack(&self, key: &[u64; 1]) -> u8 {
            key[0] as u8
        }

        fn steps(&self, state: &u8, out: &mut Steps<u8>) {
            if *state >= 10 || self.dead_end == Some(*state) {
                return;
            }
            for by in [1, 2] {
                let step = label("counter", 0, "add", by);
                if self.fault_from == Some(*state) {
                    out.fault(step, state + by as u8);
                } else {
                    out.step(step, state + by as u8);
                }
            }
        }

        fn check(&self, state: &u8) -> Result<(), String> {
            match self.forbidden {
                Some(forbidden) if forbidden == *state => Err(format!("reached {state}")),
                _ => Ok(()),
            }
        }

        fn is_right_end(&self, state: &u8) -> bool {
            *state >= 10
        }
    }

    const PLAIN: Counter = Counter {
        forbidden: None,
        dead_end: None,
        fault_from: None,
    };

    #[test]
    fn visits_every_state_once() {
        let Verdict::Clean(size) = explore(&PLAIN, 100) else {
            panic!("the plain counter is clean");
        };
        assert_eq!((size.states, size.accesses, size.right_ends), (12, 20, 2));
    }

    #[test]
    fn gives_a_shortest_trace_to_a_broken_rule() {
        let forbidden = Some(5);
        let Verdict::Broken(found) = explore(&Counter { forbidden, ..PLAIN }, 100) else {
            panic!("five is forbidden");
        };
        assert_eq!((found.rule.as_str(), found.trace.len()), ("reached 5", 3));
    }

    #[test]
    fn reports_a_state_without_a_way_out() {
        let dead_end = Some(7);
        let Verdict::Stuck(found) = explore(&Counter { dead_end, ..PLAIN }, 100) else {
            panic!("seven is a dead end");
        };
        assert_eq!(found.trace.len(), 4);
    }

    #[test]
    fn a_fault_is_no_way_out() {
        let fault_from = Some(9);
        explore(
            &Counter {
                fault_from,
                ..PLAIN
            },
            100,
        )
        .expect_stuck("nine needs a fault to go on");
    }

    #[test]
    fn stops_at_the_bound() {
        assert!(matches!(explore(&PLAIN, 3), Verdict::TooLarge(_)));
    }
}
