//! What cannot be brought together, and the sentences that say so.

use kv_proto::{BlockLayout, BlockOrder, Dtype, GroupKind, Rank, RegionKind, RegionLayout, Topology};
use kv_transport::{RegionId, RegionKey};
use kv_worker::shape::{RemoteRank, Side, compile};

fn region(layer: &str, kind: RegionKind, base: u64) -> RegionLayout {
    RegionLayout {
        layer: layer.to_owned(),
        kind,
        group: 0,
        memory: 0,
        base,
        block_stride: 64,
        block_bytes: 64,
        dtype: Dtype::U8,
        heads: 2,
        heads_total: 2,
        head_size: 8,
    }
}

/// Two layers, keys and values apart, blocks of four tokens.
fn layout() -> BlockLayout {
    let kinds = [RegionKind::Key, RegionKind::Value];
    let names = ["a", "b"];
    let regions = names.iter().flat_map(|layer| kinds.iter().map(move |kind| (layer, *kind)));
    BlockLayout {
        block_tokens: 4,
        kernel_tokens: 0,
        blocks: 4,
        order: BlockOrder::HeadsTokens,
        groups: vec![],
        regions: (0..).zip(regions).map(|(i, (layer, kind))| region(layer, kind, i * 256)).collect(),
    }
}

/// One latent for each token of one layer.
fn latent(block_tokens: u32) -> BlockLayout {
    let one = RegionLayout { heads: 1, heads_total: 1, ..region("a", RegionKind::KeyValue, 0) };
    let block_bytes = u64::from(block_tokens) * 8;
    let regions = vec![RegionLayout { block_bytes, block_stride: block_bytes, ..one }];
    BlockLayout { block_tokens, regions, ..layout() }
}

fn refusal(
    ours: &BlockLayout,
    topology: Topology,
    theirs: &BlockLayout,
    theirs_topology: Topology,
) -> String {
    for layout in [ours, theirs] {
        assert_eq!(layout.check(&[1 << 20]), Ok(()));
    }
    let remotes: Vec<RemoteRank<'_>> =
        (0..theirs_topology.ranks).map(|rank| RemoteRank { rank: Rank(rank), layout: theirs }).collect();
    compile(ours, Rank(0), topology, &remotes, theirs_topology).unwrap_err().to_string()
}

/// What is said when our layout is changed, and theirs is not.
fn changed(change: impl Fn(&mut BlockLayout)) -> String {
    let mut ours = layout();
    change(&mut ours);
    refusal(&ours, Topology::of(1), &layout(), Topology::of(1))
}

#[test]
fn what_differs_is_said_with_both_values() {
    assert_eq!(
        changed(|l| l.regions.iter_mut().for_each(|r| (r.dtype, r.head_size) = (Dtype::F16, 4))),
        "layer a: elements of a head ours 4, theirs 8"
    );
    assert_eq!(
        changed(|l| l.regions.iter_mut().for_each(|r| r.dtype = Dtype::F8E4m3)),
        "layer a: dtype ours f8_e4m3, theirs u8; elements are not converted"
    );
    assert_eq!(
        changed(|l| {
            l.regions[2].heads = 1;
            l.regions[2].heads_total = 1;
            l.regions[2].block_bytes = 32;
        }),
        "layer b: heads over all ranks ours 1, theirs 2"
    );
    assert_eq!(
        changed(|l| l.groups = vec![GroupKind::Window { tokens: 5 }]),
        "layer a: its blocks hold window of 5 tokens here, full attention there"
    );
    assert_eq!(changed(|l| l.regions[3].group = 1), "layer b: block group ours 1, theirs 0");
    assert_eq!(changed(|l| l.regions[3].layer = "c".into()), "layer c: ours has value, theirs has nothing");
    assert_eq!(
        changed(|l| l.regions[3].kind = RegionKind::Ssm),
        "layer b: ours has ssm, theirs has key and value"
    );
}

#[test]
fn layers_that_share_a_cache_share_it_there_too() {
    let share = |l: &mut BlockLayout| (l.regions[2].base, l.regions[3].base) = (0, 256);
    assert_eq!(changed(share), "layers a and b share their cache here, and each has its own there");
    // Theirs share and ours do not: both are filled. Ours share and they have but one: it is filled.
    let (mut shared, mut without) = (layout(), layout());
    share(&mut shared);
    without.regions.truncate(2);
    for (ours, theirs) in [(&layout(), &shared), (&shared, &shared), (&shared, &without)] {
        let remotes = [RemoteRank { rank: Rank(0), layout: theirs }];
        assert!(compile(ours, Rank(0), Topology::of(1), &remotes, Topology::of(1)).is_ok());
    }
}

#[test]
fn ranks_that_cannot_be_are_refused() {
    assert_eq!(
        refusal(&layout(), Topology::of(2), &layout(), Topology::of(1)),
        "ours: rank-0: region a has 2 of 2 heads; with 2 tensor-parallel ranks it should have 1"
    );
    assert_eq!(
        refusal(&layout(), Topology::of(1), &layout(), Topology::of(2)),
        "theirs: rank-0: region a has 2 of 2 heads; with 2 tensor-parallel ranks it should have 1"
    );
    let mut three = layout();
    three.regions.iter_mut().for_each(|r| (r.heads, r.heads_total) = (2, 3));
    assert_eq!(
        refusal(&three, Topology::of(2), &layout(), Topology::of(1)),
        "ours: rank-0: region a has 3 heads, which do not come out even over 2 tensor-parallel ranks"
    );
    let one = Topology::of(1);
    let none = compile(&layout(), Rank(0), one, &[], one).unwrap_err();
    assert_eq!(none.to_string(), "the producer describes no rank-0");
    let many = compile(&latent(4), Rank(0), one, &[], Topology::of(300)).unwrap_err();
    assert_eq!(
        many.to_string(),
        "this rank would have to do with 300 workers of the producer; 256 are allowed"
    );
    let staged = Topology { stages: 2, ..Topology::of(3) };
    let none = compile(&layout(), Rank(0), one, &[], staged).unwrap_err();
    assert_eq!(none.to_string(), "3 ranks cannot be shared out over 2 pipeline stages");
}

#[test]
fn tokens_are_dealt_out_alike_and_of_one_head() {
    let dealt = Topology { context: 2, ..Topology::of(2) };
    assert_eq!(
        refusal(&latent(4), dealt, &latent(8), dealt),
        "tokens are dealt out over ranks in blocks of 4 here and of 8 there; the sizes must be equal"
    );
    let mut window = latent(4);
    window.groups = vec![GroupKind::Window { tokens: 9 }];
    assert_eq!(
        refusal(&window, Topology::of(1), &window, dealt),
        "layer a: window of 9 tokens cannot be dealt out over ranks"
    );
    let mut two = latent(4);
    (two.regions[0].heads_total, two.regions[0].heads) = (2, 1);
    assert_eq!(
        refusal(&two, dealt, &two, Topology::of(2)),
        "ours: rank-0: region a has 2 heads; tokens can be dealt out over ranks only where there is one head"
    );
}

#[test]
fn a_layer_that_two_stages_have_is_refused_where_tokens_are_dealt_out() {
    let dealt = Topology { context: 2, stages: 2, ..Topology::of(4) };
    assert_eq!(
        refusal(&latent(4), Topology::of(1), &latent(4), dealt),
        "layer a: stages 0 and 1 of theirs both have it, and its tokens are dealt out over ranks; only one stage may have \
         such a layer"
    );
    // Where they are not, all of it is read from the first stage, as an embedding that both hold.
    let staged = Topology { stages: 2, ..Topology::of(2) };
    let one = latent(4);
    let remotes: Vec<RemoteRank<'_>> =
        (0..2).map(|rank| RemoteRank { rank: Rank(rank), layout: &one }).collect();
    let plan = compile(&one, Rank(0), Topology::of(1), &remotes, staged).unwrap();
    let copies: Vec<usize> = plan.sources.iter().map(|source| source.copies.len()).collect();
    assert_eq!(copies, [1, 0]);
}

#[test]
fn a_memory_without_a_handle_is_refused() {
    let mut theirs = layout();
    theirs.regions[3].memory = 2;
    let remotes = [RemoteRank { rank: Rank(0), layout: &theirs }];
    let plan = compile(&layout(), Rank(0), Topology::of(1), &remotes, Topology::of(1)).unwrap();
    let load = [kv_proto::GroupBlocks {
        group: 0,
        first: 0,
        remote_first: 0,
        tokens: 4,
        remote: [kv_proto::BlockId(1)].into_iter().collect(),
        local: [kv_proto::BlockId(0)].into_iter().collect(),
    }];
    let key = RegionKey::from_bytes(vec![1]).unwrap();
    let read = |regions: &[RegionId], keys: &[RegionKey]| {
        plan.sources[0].read_parts(Side { regions, keys }, &load).map(|_| ()).map_err(|e| e.to_string())
    };
    assert_eq!(
        read(&[RegionId(0)], std::slice::from_ref(&key)),
        Err("remote memory 2 is not registered".to_owned())
    );
    let keys = [key.clone(), key.clone(), key];
    assert_eq!(read(&[], &keys), Err("local memory 0 is not registered".to_owned()));
    assert_eq!(read(&[RegionId(0)], &keys), Ok(()));
}
