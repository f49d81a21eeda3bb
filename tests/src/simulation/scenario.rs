//! What a seed stands for: sizes, clients, latencies.

use lapisd::engine::limits::Limits;

use super::client::Kind;
use super::random::Random;

/// The trust domain of clients that break every rule. Inside it bytes are worth nothing; outside nobody may notice.
pub(super) const OUTLAWS: u32 = 666;

/// The groups that clients are of.
pub(super) const GROUPS: [u32; 2] = [100, 101];

/// One place that a client process takes; who leaves it is followed by another of its kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seat {
    /// How its clients behave.
    pub(super) kind: Kind,
    /// In whose name.
    pub(super) domain: u32,
    /// Its group.
    pub(super) gid: u32,
    /// Whether it may change tiers and quotas.
    pub(super) admin: bool,
    /// Usual time between two of its actions, microseconds.
    pub(super) think_us: u64,
}

/// Everything about a run that is decided before it starts.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    /// The run.
    pub(super) seed: u64,
    /// Nothing fails and every client gives back what it holds: so every map must be granted.
    pub(super) calm: bool,
    /// Tiers and quotas are changed all the time.
    pub(super) administered: bool,
    /// Quotas say who goes first, and not how much.
    pub(super) ranked: bool,
    /// The engine's limits.
    pub(super) limits: Limits,
    /// VRAM frames that have their memory when the daemon starts.
    pub(super) frames_ready: u32,
    /// Operations in flight in the store.
    pub(super) store_queue: usize,
    /// Operations in flight in the device, in each direction.
    pub(super) device_queue: usize,
    /// Usual time of a store operation, microseconds.
    pub(super) store_us: u64,
    /// Usual time of a device operation, microseconds.
    pub(super) device_us: u64,
    /// Sizes of the model files.
    pub(super) files: Vec<u64>,
    /// The clients.
    pub(super) seats: Vec<Seat>,
}

impl Scenario {
    /// The run that a seed stands for.
    #[must_use]
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random::new(seed, 0x5C);
        let calm = random.one_in(4);
        let mut limits = limits(&mut random, calm);
        let narrow = random.one_in(10);
        if narrow {
            narrow_ram(&mut random, &mut limits);
        }
        let page = limits.page_size;
        let frames_ready = frames_ready(seed, &limits);
        let files = (0..random.between(1, 3)).map(|_| random.between(1, 10 * page)).collect();
        let domains = random.between_u32(1, 3);
        let administered = random.one_in(2);
        let mut seats: Vec<_> =
            (0..random.between(2, 7)).map(|_| seat(&mut random, domains, administered)).collect();
        if narrow {
            seats.truncate(3);
            for seat in seats.iter_mut().filter(|seat| seat.kind != Kind::Outlaw) {
                seat.kind = random.pick(&[seat.kind, Kind::Greedy]);
            }
        }
        Self {
            ranked: Random::new(seed, 0x5D).one_in(2),
            seed,
            calm,
            administered,
            limits,
            frames_ready,
            store_queue: random.index(8) + 1,
            device_queue: random.index(4) + 1,
            store_us: random.between(5, 300),
            device_us: random.between(1, 60),
            files,
            seats,
        }
    }
}

/// Tiny tiers, so that each is full most of the time; never below what the configuration allows.
fn limits(random: &mut Random, calm: bool) -> Limits {
    let vram_frames = if random.one_in(3) { 4 } else { random.between_u32(4, 20) };
    let ram_frames = if random.one_in(3) { 8 } else { random.between_u32(8, 24) };
    let spill_least = vram_frames.saturating_sub(ram_frames);
    let unified = random.one_in(6);
    let (ram_frames, spill_least) = if unified { (0, 1) } else { (ram_frames, spill_least) };
    let no_spill = random.one_in(3) && spill_least == 0;
    let spill_slots = if no_spill { 0 } else { random.between_u32(spill_least.max(1), 32) };
    Limits {
        page_size: if random.one_in(8) { 8192 } else { 4096 },
        vram_frames,
        ram_frames,
        unified,
        spill_slots,
        depth: random.between_u32(1, 6),
        sessions_max: random.between_u32(4, 16),
        allocations_per_session_max: random.between_u32(2, 10),
        mappings_per_session_max: random.between_u32(2, 12),
        waiting_per_session_max: 1000,
        map_wait_us_max: if calm { 600_000_000 } else { random.between(50_000, 60_000_000) },
        pages_max: random.between(60, 240),
    }
}

/// VRAM frames that have their memory at the start. Of a stream of its own, as is `ranked`: so that what they stand for
/// does not change what else a seed does.
fn frames_ready(seed: u64, limits: &Limits) -> u32 {
    let mut random = Random::new(seed, 0x5E);
    let filling = !limits.unified && random.one_in(4);
    if filling { random.between_u32(2, limits.vram_frames) } else { limits.vram_frames }
}

/// RAM so small beside VRAM that one map can want all that is in it.
fn narrow_ram(random: &mut Random, limits: &mut Limits) {
    limits.unified = false;
    limits.ram_frames = 8;
    limits.vram_frames = random.between_u32(18, 28);
    limits.spill_slots = random.between_u32(limits.vram_frames, 40);
    limits.allocations_per_session_max = random.between_u32(4, 10);
}

fn seat(random: &mut Random, domains: u32, administered: bool) -> Seat {
    let kind = random.pick(Kind::ALL);
    let domain = match kind {
        Kind::Outlaw => OUTLAWS,
        Kind::Steady | Kind::Greedy | Kind::Slow | Kind::Dying | Kind::Fickle => {
            1000 + random.between_u32(1, domains)
        }
    };
    let gid = random.pick(&GROUPS);
    let admin = administered && kind != Kind::Outlaw && random.one_in(2);
    Seat { kind, domain, gid, admin, think_us: random.between(20, 800) }
}
