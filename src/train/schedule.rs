//! The learning rate over a run.
//!
//! The position is anchors committed ÷ anchors planned, with the step at work already counted: it is known in
//! advance, equal on all drafters, and does not depend on how many of them there are.

use super::options::{OptimizerOptions, Schedule};

/// Share of a warm-up, stable, decay run over which the rate falls.
pub const WSD_DECAY: f64 = 0.2;

/// The learning rate at `position` in 0..=1 of the run; a position outside is moved to the nearer end.
pub fn learning_rate(options: &OptimizerOptions, position: f64) -> f64 {
    let position = position.clamp(0.0, 1.0);
    if position < options.warmup {
        return options.lr * position / options.warmup;
    }
    let falling = match options.schedule {
        Schedule::Constant => return options.lr,
        // Share of the way from the end of the warm-up to the end.
        Schedule::Cosine => {
            let way = (position - options.warmup) / (1.0 - options.warmup).max(f64::MIN_POSITIVE);
            0.5 * (1.0 + (std::f64::consts::PI * way.min(1.0)).cos())
        }
        Schedule::Wsd => {
            let decay = WSD_DECAY.min(1.0 - options.warmup);
            ((1.0 - position) / decay.max(f64::MIN_POSITIVE)).min(1.0)
        }
    };
    options.lr * (options.floor + (1.0 - options.floor) * falling)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(schedule: Schedule) -> OptimizerOptions {
        OptimizerOptions {
            lr: 2.0,
            schedule,
            warmup: 0.04,
            floor: 0.1,
            ..OptimizerOptions::default()
        }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn the_rate_warms_up_linearly() {
        for schedule in [Schedule::Constant, Schedule::Cosine, Schedule::Wsd] {
            let o = options(schedule);
            close(learning_rate(&o, 0.0), 0.0);
            close(learning_rate(&o, 0.01), 0.5);
            close(learning_rate(&o, 0.04), 2.0);
        }
    }

    #[test]
    fn the_cosine_falls_to_the_floor() {
        let o = options(Schedule::Cosine);
        close(learning_rate(&o, 0.52), 2.0 * 0.55);
        close(learning_rate(&o, 1.0), 0.2);
        close(learning_rate(&o, 1.7), 0.2);
        let rates: Vec<_> = (4..=100)
            .map(|p| learning_rate(&o, f64::from(p) / 100.0))
            .collect();
        assert!(rates.windows(2).all(|pair| pair[0] > pair[1]));
    }

    #[test]
    fn constant_stays_and_wsd_falls_at_the_end() {
        close(learning_rate(&options(Schedule::Constant), 1.0), 2.0);
        let o = options(Schedule::Wsd);
        close(learning_rate(&o, 0.8), 2.0);
        close(learning_rate(&o, 0.9), 2.0 * 0.55);
        close(learning_rate(&o, 1.0), 0.2);
    }

    #[test]
    fn no_warm_up_and_nothing_but_warm_up_are_fine() {
        let none = OptimizerOptions {
            warmup: 0.0,
            ..options(Schedule::Cosine)
        };
        close(learning_rate(&none, 0.0), 2.0);
        for schedule in [Schedule::Cosine, Schedule::Wsd] {
            let only = OptimizerOptions {
                warmup: 1.0,
                ..options(schedule)
            };
            close(learning_rate(&only, 0.5), 1.0);
            assert!(learning_rate(&only, 1.0).is_finite());
        }
    }
}
