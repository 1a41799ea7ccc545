//! One suite for every implementation of the engine trait: each operation, forward and backward, against a
//! plain float64 computation on fresh random inputs, through strided views whose gaps must stay untouched.

mod attention;
mod basics;
mod layers;
mod loss;
mod support;

use std::sync::LazyLock;

use slipstream::engine::cpu::Cpu;
use slipstream::engine::cuda::Cuda;

/// One test for each part of the suite, on the engine that `$engine` makes.
macro_rules! conformance {
    ($module:ident, $engine:expr, $attribute:tt, [$($part:ident :: $test:ident),* $(,)?]) => {
        mod $module {
            #[allow(unused_imports)]
            use super::*;
            $(
                #[test]
                # $attribute
                fn $test() {
                    $part::$test(&$engine);
                }
            )*
        }
    };
}

macro_rules! whole_suite {
    ($module:ident, $engine:expr, $attribute:tt) => {
        conformance!(
            $module,
            $engine,
            $attribute,
            [
                basics::values_travel_to_the_device_and_back,
                basics::slots_are_copied_out_and_in,
                basics::rows_are_gathered,
                basics::rows_are_scattered,
                basics::non_finite_values_are_found,
                basics::squares_are_summed,
                basics::adamw_updates_masters_and_weights,
                layers::linear_and_its_gradients,
                layers::norm_and_its_gradient,
                layers::head_norm_rotary_and_its_gradient,
                layers::swiglu_and_its_gradient,
                layers::geglu,
                layers::matrices_are_scaled_added_and_scattered,
                attention::causal_attention_of_packed_documents,
                attention::block_attention_and_its_gradient,
                attention::cache_attention_of_chains_and_trees,
                loss::head_loss_with_every_option,
                loss::head_loss_over_many_chunks,
                loss::top_tokens_and_logits,
                loss::tokens_are_chosen_and_drawn,
            ]
        );
    };
}

whole_suite!(cpu_one_thread, Cpu::new(1).unwrap(), [cfg(all())]);
whole_suite!(cpu_three_threads, Cpu::new(3).unwrap(), [cfg(all())]);
whole_suite!(cuda, *CUDA, [ignore = "needs a GPU"]);

/// One engine for all tests: they run side by side on its queues.
static CUDA: LazyLock<Cuda> = LazyLock::new(|| Cuda::new(0).unwrap());

mod cpu_bits {
    use super::*;

    #[test]
    fn threads_change_no_bit() {
        attention::same_bits(&Cpu::new(1).unwrap(), &Cpu::new(3).unwrap());
        loss::same_bits(&Cpu::new(1).unwrap(), &Cpu::new(3).unwrap());
    }

    #[test]
    fn decoding_has_the_bits_of_prefill() {
        attention::decoding_has_the_bits_of_prefill(&Cpu::new(1).unwrap());
    }
}
