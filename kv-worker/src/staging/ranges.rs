//! Which bytes a copy of blocks is.

use std::fmt::Display;
use std::sync::Arc;

use kv_proto::{BlockId, BlockLayout, CopyOrder, CopyWay, RegionLayout};
use kv_transport::device::CopyRange;
use kv_transport::{Device, Memory};

use super::{DeviceCache, HostPool, StagerError};

/// Where the blocks of a layer lie on one side.
#[derive(Debug, Clone, Copy)]
struct Place {
    memory: usize,
    base: u64,
    stride: u64,
}

impl Place {
    fn of(region: &RegionLayout) -> Self {
        Self { memory: region.memory as usize, base: region.base, stride: region.block_stride }
    }

    /// Offset of a kernel block, of so many in a block.
    fn at(&self, block: BlockId, part: u64, parts: u64) -> u64 {
        self.base + u64::from(block.0) * self.stride + part * (self.stride / parts)
    }
}

/// Both sides of a layer's blocks.
#[derive(Debug)]
struct Region {
    group: u32,
    /// Bytes of one kernel block, which lie together.
    bytes: u64,
    device: Place,
    host: Place,
}

/// The cache and the host pool side by side. It keeps both alive.
#[derive(Debug)]
pub(super) struct Pairing {
    device: Arc<dyn Device>,
    device_memories: Vec<Memory>,
    host_memories: Vec<Memory>,
    regions: Vec<Region>,
    /// Kernel blocks in a block.
    parts: u64,
    groups: u32,
    device_blocks: u32,
    host_blocks: u32,
}

fn same<T: PartialEq + Display>(
    field: impl FnOnce() -> String,
    device: &T,
    host: &T,
) -> Result<(), StagerError> {
    if device == host {
        return Ok(());
    }
    Err(StagerError::Differ { field: field(), device: device.to_string(), host: host.to_string() })
}

fn sizes(memories: &[Memory]) -> Vec<u64> {
    memories.iter().map(|memory| memory.len() as u64).collect()
}

impl Pairing {
    /// Checks both layouts, and that they hold the same.
    pub(super) fn new(cache: DeviceCache, host: HostPool) -> Result<Self, StagerError> {
        let DeviceCache { layout, memories, .. } = cache;
        layout.check(&sizes(&memories)).map_err(StagerError::Layout)?;
        host.layout.check(&sizes(&host.memories)).map_err(StagerError::HostLayout)?;
        let first = memories.first().and_then(Memory::on_device).ok_or(StagerError::NoDevice)?;
        let device = Arc::clone(first);
        for (index, memory) in memories.iter().enumerate() {
            let found = memory.on_device().map(|device| device.id());
            if found != Some(device.id()) {
                let found = found.map_or_else(|| "the host".to_owned(), |id| id.to_string());
                return Err(StagerError::NotOnDevice { index, found, first: device.id() });
            }
        }
        for (index, memory) in host.memories.iter().enumerate() {
            memory.base().map_err(|source| StagerError::HostMemory { index, source })?;
        }
        let regions = pair(&layout, &host.layout)?;
        Ok(Self {
            device,
            device_memories: memories,
            host_memories: host.memories,
            regions,
            parts: u64::from(layout.kernel_blocks()),
            groups: u32::try_from(layout.group_kinds().count()).unwrap_or(u32::MAX),
            device_blocks: layout.blocks,
            host_blocks: host.layout.blocks,
        })
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// The bytes of a copy, neighbours merged. An error says what is wrong with the order, with its values.
    pub(super) fn ranges(&self, order: &CopyOrder) -> Result<Vec<CopyRange>, String> {
        order.check(self.device_blocks, self.host_blocks, self.groups).map_err(|error| error.to_string())?;
        let device: Vec<u64> = self.device_memories.iter().map(|memory| memory.place().address).collect();
        let host = self.host_memories.iter().map(Memory::base).collect::<Result<Vec<*mut u8>, _>>();
        let host = host.map_err(|error| error.to_string())?;
        let mut all = Vec::new();
        for group in &order.groups {
            for region in self.regions.iter().filter(|region| region.group == group.group) {
                for (far, near) in group.device.iter().zip(group.host.iter()) {
                    for part in 0..self.parts {
                        let offset = region.host.at(near, part, self.parts);
                        all.push(CopyRange {
                            device: device[region.device.memory] + region.device.at(far, part, self.parts),
                            // The layout was checked: it fits the memory, and so an address.
                            host: host[region.host.memory].wrapping_add(offset as usize),
                            len: region.bytes as usize,
                        });
                    }
                }
            }
        }
        // Layers that share their cache are the same bytes twice.
        all.sort_unstable_by_key(|range| (range.device, range.host.addr(), range.len));
        all.dedup();
        match order.way {
            CopyWay::Save => no_overlap(&all, |range| range.host.addr() as u64)?,
            CopyWay::Restore => no_overlap(&all, |range| range.device)?,
        }
        Ok(merge(all))
    }
}

/// The layers of both sides, which must be the same in the same order.
fn pair(device: &BlockLayout, host: &BlockLayout) -> Result<Vec<Region>, StagerError> {
    same(|| "block_tokens".to_owned(), &device.block_tokens, &host.block_tokens)?;
    same(|| "kernel_tokens".to_owned(), &device.tokens_of_kernel(), &host.tokens_of_kernel())?;
    same(|| "order".to_owned(), &device.order, &host.order)?;
    same(|| "the number of regions".to_owned(), &device.regions.len(), &host.regions.len())?;
    let parts = u64::from(device.kernel_blocks());
    let both = device.regions.iter().zip(&host.regions).enumerate();
    both.map(|(index, (far, near))| {
        let field = |name: &'static str| move || format!("{name} of region {index}");
        same(field("layer"), &far.layer, &near.layer)?;
        same(field("kind"), &far.kind, &near.kind)?;
        same(field("group"), &far.group, &near.group)?;
        same(field("block_bytes"), &far.block_bytes, &near.block_bytes)?;
        same(field("dtype"), &far.dtype, &near.dtype)?;
        same(field("heads"), &far.heads, &near.heads)?;
        same(field("head_size"), &far.head_size, &near.head_size)?;
        let bytes = far.block_bytes / parts;
        Ok(Region { group: far.group, bytes, device: Place::of(far), host: Place::of(near) })
    })
    .collect()
}

/// Bytes that would be written twice are written by nobody.
fn no_overlap(ranges: &[CopyRange], start: impl Fn(&CopyRange) -> u64) -> Result<(), String> {
    let mut written: Vec<(u64, u64)> =
        ranges.iter().map(|range| (start(range), start(range) + range.len as u64)).collect();
    written.sort_unstable();
    match written.windows(2).find(|pair| pair[1].0 < pair[0].1) {
        None => Ok(()),
        Some(pair) => {
            let ((a, to), (b, _)) = (pair[0], pair[1]);
            Err(format!(
                "bytes from {b:#x} would be written twice, also by what is written from {a:#x} to {to:#x}"
            ))
        }
    }
}

/// Makes one range of those that are neighbours on both sides; they come in the device's order.
fn merge(ranges: Vec<CopyRange>) -> Vec<CopyRange> {
    let mut merged: Vec<CopyRange> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last)
                if last.device + last.len as u64 == range.device
                    && last.host.addr() + last.len == range.host.addr() =>
            {
                last.len += range.len;
            }
            _ => merged.push(range),
        }
    }
    merged
}
