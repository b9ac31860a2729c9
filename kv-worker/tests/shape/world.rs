//! Random pairs of engines and of loads between them. Everything comes from one seed.

use kv_proto::{
    BlockId, BlockLayout, BlockList, BlockOrder, Dtype, GroupBlocks, GroupKind, RegionKind, Topology,
};

use crate::caches::{self, RankCache};

/// A small generator: the same numbers for the same seed, everywhere and for ever.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (((self.next() >> 32) * u64::from(end)) >> 32) as u32
    }

    pub(crate) fn chance(&mut self, percent: u32) -> bool {
        self.below(100) < percent
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u32) as usize]
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for i in (1..list.len()).rev() {
            list.swap(i, self.below(i as u32 + 1) as usize);
        }
    }
}

/// One thing that a layer keeps for each token, or of each request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) kind: RegionKind,
    pub(crate) heads: u32,
    /// Elements of a head.
    pub(crate) size: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layer {
    pub(crate) name: String,
    pub(crate) group: u32,
    pub(crate) dtype: Dtype,
    pub(crate) parts: Vec<Part>,
    pub(crate) stage: u32,
    /// The layer whose cache this one looks at; itself, if it has its own.
    pub(crate) looks_at: usize,
}

#[derive(Debug, Clone)]
pub(crate) struct Engine {
    pub(crate) topology: Topology,
    pub(crate) block_tokens: u32,
    /// Tokens of a kernel block, which may be a whole block.
    pub(crate) kernel_tokens: u32,
    pub(crate) order: BlockOrder,
    /// Keys and values of a head side by side.
    pub(crate) together: bool,
    pub(crate) kinds: Vec<GroupKind>,
    pub(crate) layers: Vec<Layer>,
    pub(crate) blocks: u32,
    pub(crate) ranks: Vec<RankCache>,
}

impl Engine {
    /// Tokens of one entry of a block list.
    pub(crate) fn entry_tokens(&self) -> u32 {
        self.block_tokens * self.topology.context
    }

    pub(crate) fn layouts(&self) -> impl Iterator<Item = &BlockLayout> {
        self.ranks.iter().map(|rank| &rank.layout)
    }
}

pub(crate) struct Pair {
    pub(crate) p: Engine,
    pub(crate) d: Engine,
    pub(crate) tokens: u32,
    pub(crate) groups: Vec<GroupBlocks>,
}

const HEADS: [u32; 7] = [1, 2, 3, 4, 6, 8, 12];
const BLOCK_TOKENS: [u32; 16] = [1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16, 24, 48];

fn is_even(heads: u32, tensor: u32) -> bool {
    heads.is_multiple_of(tensor) || tensor.is_multiple_of(heads)
}

/// Ranks of a stage over which all the layers' heads come out even, mostly.
fn tensor(rng: &mut Rng, layers: &[Layer]) -> u32 {
    let fits = |t: u32| layers.iter().flat_map(|l| &l.parts).all(|part| is_even(part.heads, t));
    let wanted = 1 + rng.below(8);
    if rng.chance(4) { wanted } else { (1..=wanted).rev().find(|t| fits(*t)).unwrap() }
}

fn layers(rng: &mut Rng, kinds: &[GroupKind], per_group: &[u32], single: bool) -> Vec<Layer> {
    let heads = if single { 1 } else { rng.pick(&HEADS) };
    let mut layers = Vec::new();
    let dtype = if rng.chance(70) { Dtype::U8 } else { rng.pick(&[Dtype::F8E4m3, Dtype::F16, Dtype::F32]) };
    for (group, kind) in kinds.iter().enumerate() {
        let heads = if single || rng.chance(75) { heads } else { rng.pick(&HEADS) };
        let part = |kind, heads, size| Part { kind, heads, size };
        let size = 1 + rng.below(3);
        let parts = match kind {
            GroupKind::State => {
                let conv = part(RegionKind::Conv, heads, size);
                let ssm =
                    part(RegionKind::Ssm, if rng.chance(50) { heads * 2 } else { heads }, 1 + rng.below(3));
                if rng.chance(30) { vec![ssm] } else { vec![conv, ssm] }
            }
            _ if single || rng.chance(10) => vec![part(RegionKind::KeyValue, heads, size)],
            _ => {
                let of_values = if rng.chance(80) { size } else { 1 + rng.below(3) };
                vec![part(RegionKind::Key, heads, size), part(RegionKind::Value, heads, of_values)]
            }
        };
        for _ in 0..per_group[group] {
            let looks_at = layers.len();
            let name = format!("layer.{looks_at}");
            let parts = parts.clone();
            layers.push(Layer { name, group: group as u32, dtype, parts, stage: 0, looks_at });
        }
    }
    layers
}

/// Shares each group's layers out over the stages, so that each stage has some of each.
fn share_out(rng: &mut Rng, layers: &mut [Layer], stages: u32) {
    let groups = layers.iter().map(|l| l.group).max().unwrap() + 1;
    for group in 0..groups {
        let of: Vec<usize> = (0..layers.len()).filter(|i| layers[*i].group == group).collect();
        let mut cuts: Vec<usize> = (1..of.len()).collect();
        rng.shuffle(&mut cuts);
        cuts.truncate(stages as usize - 1);
        for (place, index) in of.into_iter().enumerate() {
            layers[index].stage = cuts.iter().filter(|cut| **cut <= place).count() as u32;
        }
    }
}

/// Lets some layers look at the cache of another.
fn share_caches(rng: &mut Rng, layers: &mut [Layer]) {
    for later in 1..layers.len() {
        let earlier = rng.below(later as u32) as usize;
        let alike = |l: &Layer| (l.group, l.stage, l.dtype, l.parts.clone());
        if alike(&layers[later]) == alike(&layers[earlier]) && layers[earlier].looks_at == earlier {
            layers[later].looks_at = earlier;
        }
    }
}

/// Makes the two sides differ in something that cannot be brought together, or that only looks so.
fn twist(rng: &mut Rng, p: &mut Engine, d: &mut Engine) {
    let index = rng.below(d.layers.len() as u32) as usize;
    let groups = d.kinds.len() as u32;
    match rng.below(9) {
        0 => d.layers[index].dtype = rng.pick(&[Dtype::F16, Dtype::F32, Dtype::Bf16, Dtype::F8E5m2]),
        1 => {
            let part = rng.below(d.layers[index].parts.len() as u32) as usize;
            d.layers[index].parts[part].size += 1;
        }
        2 => {
            let heads = rng.pick(&HEADS);
            d.layers[index].parts.iter_mut().for_each(|part| part.heads = heads);
        }
        // A layer that only we have, and one that only they have.
        3 => {
            let name = "only.ours".to_owned();
            let own = d.layers.len();
            d.layers.push(Layer { name, looks_at: own, ..d.layers[index].clone() });
        }
        4 => {
            let name = "only.theirs".to_owned();
            let own = p.layers.len();
            p.layers.push(Layer { name, looks_at: own, ..p.layers[0].clone() });
        }
        5 => {
            let group = rng.below(groups) as usize;
            let window = GroupKind::Window { tokens: 1 + rng.below(9) };
            if d.kinds[group] != GroupKind::State {
                d.kinds[group] = rng.pick(&[GroupKind::Full, window]);
            }
        }
        6 if groups > 1 => {
            p.kinds.swap(0, 1);
            for layer in &mut p.layers {
                layer.group = match layer.group {
                    0 => 1,
                    1 => 0,
                    more => more,
                };
            }
        }
        7 => share_caches(rng, &mut d.layers),
        8 => {
            let layer = &mut p.layers[0];
            layer.parts = match layer.parts[0].kind {
                // Half of what a layer has.
                RegionKind::Key => vec![layer.parts[rng.below(2) as usize].clone()],
                _ => layer.parts.clone(),
            };
        }
        _ => {}
    }
    for engine in [p, d] {
        // Who looks at a cache that was changed, has its own from now on.
        for index in 0..engine.layers.len() {
            let (layer, seen) = (&engine.layers[index], &engine.layers[engine.layers[index].looks_at]);
            if (layer.dtype, &layer.parts, layer.group) != (seen.dtype, &seen.parts, seen.group) {
                engine.layers[index].looks_at = index;
            }
        }
    }
}

fn window(rng: &mut Rng) -> GroupKind {
    GroupKind::Window { tokens: 1 + rng.below(9) }
}

/// Two engines and a load, from a seed.
pub(crate) fn pair(seed: u64) -> Pair {
    let mut rng = Rng(seed);
    let rng = &mut rng;
    let dealt = rng.chance(15);
    let mut kinds = vec![if dealt || rng.chance(75) { GroupKind::Full } else { window(rng) }];
    while kinds.len() < 3 && rng.chance(if dealt { 8 } else { 30 }) {
        let other = window(rng);
        kinds.push(rng.pick(&[GroupKind::Full, other, GroupKind::State]));
    }
    if kinds.len() == 1 && !dealt && rng.chance(5) {
        kinds = vec![GroupKind::State];
    }
    let stages = |rng: &mut Rng| if rng.chance(65) { 1 } else { 2 + rng.below(2) };
    let (p_stages, d_stages) = (stages(rng), stages(rng));
    let per_group: Vec<u32> = kinds.iter().map(|_| p_stages.max(d_stages) + rng.below(3)).collect();
    let single = (dealt && !rng.chance(3)) || rng.chance(8);
    let layers = layers(rng, &kinds, &per_group, single);

    let engine = |rng: &mut Rng, stages: u32| {
        let tensor = if stages > 1 { tensor(rng, &layers).min(4) } else { tensor(rng, &layers) };
        let context = if dealt && rng.chance(60) { tensor } else { 1 };
        let mut layers = layers.clone();
        share_out(rng, &mut layers, stages);
        let block_tokens = rng.pick(&BLOCK_TOKENS);
        Engine {
            topology: Topology { ranks: tensor * stages, stages, context },
            block_tokens,
            kernel_tokens: block_tokens,
            order: rng.pick(&[BlockOrder::HeadsTokens, BlockOrder::TokensHeads]),
            together: rng.chance(50),
            kinds: kinds.clone(),
            layers,
            blocks: 0,
            ranks: vec![],
        }
    };
    let (mut p, mut d) = (engine(rng, p_stages), engine(rng, d_stages));
    if rng.chance(if dealt { 80 } else { 40 }) {
        d.block_tokens = p.block_tokens;
    }
    for engine in [&mut p, &mut d] {
        let divisors: Vec<u32> =
            (1..=engine.block_tokens).filter(|k| engine.block_tokens.is_multiple_of(*k)).collect();
        engine.kernel_tokens = if rng.chance(60) { engine.block_tokens } else { rng.pick(&divisors) };
    }
    if rng.chance(15) {
        share_caches(rng, &mut p.layers);
        if rng.chance(70) {
            // The same layers share on our side, as far as they are of one stage there.
            for index in 0..d.layers.len() {
                let seen = p.layers[index].looks_at;
                if d.layers[seen].stage == d.layers[index].stage {
                    d.layers[index].looks_at = seen;
                }
            }
        }
    }
    if rng.chance(25) {
        twist(rng, &mut p, &mut d);
    }

    let token_bytes: u32 = p
        .layers
        .iter()
        .filter(|l| kinds[l.group as usize] != GroupKind::State)
        .flat_map(|l| l.parts.iter().map(|part| part.heads * part.size * l.dtype.bytes() as u32))
        .sum();
    let most = (240 / token_bytes.max(1)).clamp(3, 60);
    let tokens = 1 + rng.below(most);
    let (groups, p_lists, d_lists) = lists(rng, tokens, &p, &d);
    let shared = [rng.chance(30), rng.chance(30)];
    p.blocks = pool(rng, &p_lists, shared[0]);
    d.blocks = pool(rng, &d_lists, shared[1]);
    let groups = groups
        .into_iter()
        .zip(
            draw(rng, &p_lists, p.blocks, shared[0])
                .into_iter()
                .zip(draw(rng, &d_lists, d.blocks, shared[1])),
        )
        .map(|(group, (remote, local))| GroupBlocks { remote, local, ..group })
        .collect();
    caches::lay_out(rng, &mut p, shared[0]);
    caches::lay_out(rng, &mut d, shared[1]);
    Pair { p, d, tokens, groups }
}

/// Where each group's lists begin, and how long they are on both sides.
fn lists(rng: &mut Rng, tokens: u32, p: &Engine, d: &Engine) -> (Vec<GroupBlocks>, Vec<u32>, Vec<u32>) {
    let (theirs, ours) = (p.entry_tokens(), d.entry_tokens());
    let (their_end, our_end) = (tokens.div_ceil(theirs), tokens.div_ceil(ours));
    // The part of the prompt that is there already is the same for all groups.
    let hit = if rng.chance(50) { 0 } else { rng.below(our_end + 1) };
    let (mut groups, mut p_lists, mut d_lists) = (vec![], vec![], vec![]);
    for (group, kind) in d.kinds.iter().enumerate() {
        let mut blocks = GroupBlocks {
            group: group as u32,
            first: 0,
            remote_first: 0,
            tokens,
            remote: BlockList::default(),
            local: BlockList::default(),
        };
        if *kind == GroupKind::State {
            (blocks.first, blocks.remote_first) = (our_end - 1, their_end - 1);
            p_lists.push(1);
            d_lists.push(1);
        } else {
            blocks.first = hit;
            if let GroupKind::Window { tokens: window } = kind
                && rng.chance(50)
            {
                blocks.first = hit.max(tokens.saturating_sub(*window) / ours);
            }
            let looked_at = match kind {
                GroupKind::Window { tokens: window } => tokens.saturating_sub(*window),
                _ => 0,
            };
            let needed = (blocks.first * ours).max(looked_at).min(tokens);
            let latest = (needed / theirs).min(their_end);
            blocks.remote_first = if rng.chance(50) { rng.below(latest + 1) } else { latest };
            p_lists.push(their_end - blocks.remote_first);
            d_lists.push(our_end - blocks.first);
        }
        groups.push(blocks);
    }
    (groups, p_lists, d_lists)
}

fn pool(rng: &mut Rng, lists: &[u32], shared: bool) -> u32 {
    let used = if shared { lists.iter().sum() } else { lists.iter().copied().max().unwrap_or(0) };
    used.max(1) + rng.below(3)
}

/// Blocks for each list; of different lists different ones, where groups share their memory.
fn draw(rng: &mut Rng, lists: &[u32], pool: u32, shared: bool) -> Vec<BlockList> {
    let fresh = |rng: &mut Rng| -> Vec<BlockId> {
        let mut ids: Vec<BlockId> = (0..pool).map(BlockId).collect();
        match rng.below(3) {
            0 => {}
            1 => ids.reverse(),
            _ => rng.shuffle(&mut ids),
        }
        ids
    };
    let mut ids = fresh(rng);
    let mut drawn = Vec::new();
    for count in lists {
        if !shared {
            ids = fresh(rng);
        }
        drawn.push(ids.drain(..*count as usize).collect());
    }
    drawn
}
