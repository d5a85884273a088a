//! Initial values of rank 0 on all ranks.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor, Var};
use optimisers::{AdamW, Communicator, LocalRank, Setup, broadcast};

use support::common::{Vars, bits, random, var};
use support::threads::on;

/// Variables of all kinds, with other values on every rank.
fn variables(world: &LocalRank) -> Vars {
    let seed = 10 * world.rank() as u64;
    let mut model: Vars = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize], dtype| {
        model.insert(
            name.to_string(),
            var(&random(seed + 1, shape, dtype, &Device::Cpu)),
        )
    };
    add("large", &[1_300_000], DType::BF16);
    add("matrix", &[30, 7], DType::F64);
    add("empty", &[0], DType::F32);
    add("scalar", &[], DType::F16);
    model.insert("tied".to_string(), model["matrix"].clone());
    model.insert(
        "steps".to_string(),
        Var::from_tensor(&Tensor::new(&[seed as u32, 3], &Device::Cpu).expect("a tensor"))
            .expect("a variable"),
    );
    model
}

#[test]
fn all_ranks_get_the_values_of_the_first() {
    for size in [1, 3] {
        let all = on(size, |world| {
            let model = variables(&world);
            let before: Vec<Vec<u64>> = model.values().map(|x| bits(x)).collect();
            broadcast(&world, &model).expect("a broadcast");
            let floats: Vars = model
                .iter()
                .filter(|(_, x)| x.dtype().is_float())
                .map(|(path, x)| (path.clone(), x.clone()))
                .collect();
            let _ = Setup::over(&world)
                .build(AdamW::new(0.1), &floats)
                .expect("the same values on all ranks");
            (before, model.values().map(|x| bits(x)).collect::<Vec<_>>())
        });
        for (rank, (before, after)) in all.iter().enumerate() {
            assert!(*after == all[0].0, "rank {rank} of {size}");
            assert_eq!(before == after, rank == 0);
        }
    }
}

#[test]
fn other_models_are_refused_on_all() {
    type Change = fn(&mut Vars);
    let changes: [(Change, &str); 3] = [
        (
            |model| drop(model.remove("tied")),
            "[\"matrix\"] of shape [30, 7] in F64 on rank 1; all",
        ),
        (
            |model| {
                drop(model.insert(
                    "scalar".to_string(),
                    var(&random(1, &[1], DType::F16, &Device::Cpu)),
                ))
            },
            "[\"scalar\"] of shape [1] in F16",
        ),
        (
            |model| drop(model.insert("z".to_string(), var(&random(1, &[1], DType::F16, &Device::Cpu)))),
            "nothing more on ranks 0 and 2; [\"z\"] of shape [1] in F16 on rank 1",
        ),
    ];
    for (change, words) in changes {
        let told = on(3, move |world| {
            let mut model = variables(&world);
            if world.rank() == 1 {
                change(&mut model);
            }
            let before: Vec<Vec<u64>> = model.values().map(|x| bits(x)).collect();
            let error = broadcast(&world, &model).expect_err("another model").to_string();
            assert!(model.values().map(|x| bits(x)).eq(before), "nothing has changed");
            error
        });
        assert!(
            told.iter()
                .all(|error| error.contains("rank 1 differs in a variable") && error.contains(words)),
            "{told:?}"
        );
    }
}
