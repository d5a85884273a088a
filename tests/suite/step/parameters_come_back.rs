//! Whatever fails while something else takes the place of the parameters: they come back, bit for bit.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Tensor};
use optimisers::{
    AdamW, ClipGlobalNorm, Communicator, Ema, MixedPrecision, OptimiserChain, Result, Rule, Sam, Setup,
    StateTree, Update, update,
};

use support::common::{Grads, Snapshot, Vars, grads, model, says, snapshot, tensor};
use support::threads::{Failure, Leaving, on};

/// One that is cut among the ranks, and one that is not.
const SHAPES: [&[usize]; 2] = [&[20_000], &[3, 4]];

fn gradients(call: u64) -> Grads {
    grads(SHAPES.map(|shape| Some(tensor(call, shape, DType::F32))))
}

fn weights(seed: u64, dtype: DType) -> [Tensor; 2] {
    SHAPES.map(|shape| tensor(seed, shape, dtype))
}

/// A call that all ranks make.
type Phase = fn(&mut StateTree, &Vars) -> Result<()>;

/// With what is there after it: the parameters and state from before, but for the new weights.
const PHASES: [(&str, Phase); 8] = [
    ("averages in the model", |state, model| {
        state.with_averages(model, || Ok(()))
    }),
    ("ascent", |state, model| {
        Sam::new(0.5)
            .ascend(Update::new(state), model, &gradients(7))?
            .restore()
    }),
    ("adaptive ascent without a restore", |state, model| {
        Sam::new(0.5)
            .adaptive()
            .ascend(Update::new(state), model, &gradients(7))
            .map(drop)
    }),
    ("averages", |state, model| state.averages(model).map(drop)),
    ("masters", |state, model| state.masters(model).map(drop)),
    ("comparison", |state, model| state.check_masters(model)),
    ("refreshed masters", |state, model| state.refresh_masters(model)),
    ("new weights", |state, model| {
        let values: BTreeMap<_, _> = model.keys().cloned().zip(weights(9, DType::F32)).collect();
        state.set_masters(model, &values).map(drop)
    }),
];

/// What a rank has before a phase and after it, and whether that failed.
struct Seen {
    before: Snapshot,
    after: Snapshot,
    failed: bool,
}

/// A phase of three ranks, of which one fails at one of its words.
fn run(phase: Phase, is_mixed: bool, [leaver, words]: [usize; 2], failure: Failure) -> Vec<Seen> {
    on(3, move |rank| {
        let is_leaver = rank.rank() == leaver;
        let world = Leaving::new(rank, usize::MAX, failure);
        let rule = OptimiserChain::new((ClipGlobalNorm::new(0.5), AdamW::new(0.1), Ema::new(0.9)));
        let dtype = if is_mixed { DType::BF16 } else { DType::F32 };
        let model = model(&weights(1, dtype));
        let state = match is_mixed {
            true => Setup::over(&world).build(MixedPrecision::new(DType::F32, rule), &model),
            false => Setup::over(&world).build(Box::new(rule) as Box<dyn Rule>, &model),
        };
        let mut state = state.expect("a state");
        for call in 2..4 {
            update(&mut state, &model, &gradients(call)).expect("an update");
        }
        let before = snapshot(&model, &state);
        world.say(if is_leaver { words } else { usize::MAX });
        let outcome = catch_unwind(AssertUnwindSafe(|| phase(&mut state, &model)));
        let failed = !matches!(outcome, Ok(Ok(())));
        if let (true, Ok(Err(error))) = (is_leaver, &outcome) {
            says(error, &["this rank leaves"]);
        }
        Seen {
            before,
            after: snapshot(&model, &state),
            failed,
        }
    })
}

/// A transport that fails at any of its calls: with an error before or after it, or with a panic.
#[test]
fn parameters_come_back_after_every_failure_of_a_rank() {
    let mut failures = 0;
    for (name, phase) in PHASES {
        for is_mixed in [false, true] {
            let whole = run(phase, is_mixed, [0, usize::MAX], Failure::Before);
            assert!(whole.iter().all(|seen| !seen.failed), "{name}");
            // Averages start anew from refreshed masters.
            let is_new = ["refreshed masters", "new weights"].contains(&name);
            assert!(
                is_new != whole.iter().all(|seen| seen.before == seen.after),
                "{name}"
            );
            for failure in [Failure::Before, Failure::After, Failure::Panic] {
                for words in 0.. {
                    let leaver = words % 3;
                    let seen = run(phase, is_mixed, [leaver, words], failure);
                    for (rank, (seen, whole)) in seen.iter().zip(&whole).enumerate() {
                        let what = format!(
                            "{name}, rank {rank}: rank {leaver} fails at word {words}, {failure:?}, mixed: \
                             {is_mixed}"
                        );
                        assert!(seen.before == whole.before, "{what}");
                        // New weights are there once all ranks have them; each has all of them, or none.
                        assert!(seen.after == seen.before || seen.after == whole.after, "{what}");
                        failures += usize::from(seen.failed);
                    }
                    if !seen[leaver].failed {
                        assert!(words > 0, "{name}: the ranks talk");
                        break;
                    }
                }
            }
        }
    }
    assert!(failures > 300, "{failures}");
}
