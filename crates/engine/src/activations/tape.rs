//! The tape: what was saved, in which order, where each saved tensor is now, and which will be used next.
//!
//! Pure: no device, no memory, no time. The same calls give the same answers, so what travels and when sources are freed
//! depends on the program alone and never on how fast anything ran.
//!
//! Each saved tensor is a *save*; a storage at one version is an *entry*, shared by all saves of it. Saves lie on the
//! tape in the order of the forward pass, each at the number of bytes saved before it. Distances on the tape are bytes,
//! of kept and offloaded tensors alike, and the *window* is one such distance:
//! - a source is freed when more than a window has been saved from it on;
//! - a use of a save at some place asks for the entries up to a window before it.
//!
//! So at most a window of bytes waits to be freed and at most a window of bytes has arrived early, and both follow the
//! computation: if half of the bytes are kept, half a window is in flight.
//!
//! A save may have a [`Route`], which a plan made for it. Then the route decides instead of the window: the save leaves
//! or stays, is freed at the end of one layer, and is fetched from the first use in another layer on.

use std::collections::{BTreeMap, HashMap, VecDeque};

/// A saved tensor, numbered in the order of saving.
pub type SaveId = u64;
/// A storage at one version.
pub type EntryId = u64;

/// What makes two saves the same bytes. The caller keeps the storage's identity from being used again while an entry
/// with it is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// Identity of the storage.
    pub storage: u64,
    /// All its bytes.
    pub storage_bytes: u64,
    /// Where its memory is.
    pub addr: u64,
    /// The range of it that is saved.
    pub start_bytes: u64,
    /// Length of that range.
    pub bytes: u64,
    /// How often it has been changed.
    pub version: u64,
}

impl Key {
    /// The same storage, all of it.
    fn whole(self) -> Self {
        Self { start_bytes: 0, bytes: self.storage_bytes, ..self }
    }
}

/// What a plan says about a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// Whether it leaves the device.
    pub leaves: bool,
    /// Its source is freed when this layer is about to begin, at the end of the one before.
    pub free_at: u32,
    /// It is fetched from the first use of a save of this layer, or of one before it, on.
    pub fetch_at: u32,
}

/// Where an entry's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Location {
    /// On the device, for good.
    Kept,
    /// On the device still; on its way to the host.
    Leaving,
    /// On the host alone.
    Host,
    /// On the host, and on its way to the device.
    Arriving,
    /// On the host and on the device.
    Here,
}

#[derive(Debug)]
struct TapeEntry {
    key: Key,
    location: Location,
    /// Bytes saved before it.
    start: u64,
    pass: u64,
    route: Option<Route>,
    saves: Vec<SaveId>,
}

#[derive(Debug, Clone, Copy)]
struct Save {
    entry: EntryId,
    pass: u64,
    layer: u32,
    /// Bytes saved before it.
    start: u64,
    /// The layer whose first use has it fetched, where a route says so.
    fetch_at: Option<u32>,
    uses: u32,
}

/// The answer to a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// The save's number.
    pub save: SaveId,
    /// The entry it belongs to.
    pub entry: EntryId,
    /// Where the entry's range begins in the storage.
    pub start_bytes: u64,
    /// Whether the entry is new.
    pub new: bool,
    /// Whether the entry is to leave the device (new entries), or has (known ones).
    pub offload: bool,
}

/// The answer to a use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// The entry that is used.
    pub entry: EntryId,
    /// Where it was: at [`Location::Host`] it has to be fetched now.
    pub location: Location,
    /// Entries to fetch ahead, soonest first. They count as arriving from now on.
    pub ahead: Vec<EntryId>,
    /// Whether the bytes on the device will be used again soon.
    pub hold: bool,
}

const PARTS: u128 = 1_000_000_000;

/// The tape.
#[derive(Debug)]
pub struct Tape {
    window_bytes: Option<u64>,
    /// In parts per billion.
    fraction: u128,
    credit: u128,
    entries: HashMap<EntryId, TapeEntry>,
    known: HashMap<Key, EntryId>,
    saves: BTreeMap<SaveId, Save>,
    /// Entries on their way out, oldest first.
    leaving: VecDeque<EntryId>,
    /// The same for those whose route says when their source is freed.
    routed: VecDeque<EntryId>,
    /// The last layer whose saves were used, and its pass: routes are looked through when it changes.
    used: Option<(u64, u32)>,
    next: u64,
    total: u64,
    pass: u64,
    layer: u32,
    layer_start: u64,
    largest_layer: u64,
    largest_entry: u64,
}

/// Until a layer has been seen to its end, the window is this many times the size of the largest tensor.
const TENSORS_IN_WINDOW: u64 = 4;

impl Tape {
    /// An empty tape. Without a window of its own it takes what the largest layer saves.
    pub fn new(window_bytes: Option<u64>, fraction: f64) -> Self {
        let mut tape = Self {
            window_bytes,
            fraction: 0,
            credit: 0,
            entries: HashMap::new(),
            known: HashMap::new(),
            saves: BTreeMap::new(),
            leaving: VecDeque::new(),
            routed: VecDeque::new(),
            used: None,
            next: 0,
            total: 0,
            pass: 0,
            layer: 0,
            layer_start: 0,
            largest_layer: 0,
            largest_entry: 0,
        };
        tape.set_fraction(fraction);
        tape
    }

    /// Of the bytes saved from now on, so much leaves the device.
    pub fn set_fraction(&mut self, fraction: f64) {
        self.fraction = (fraction.clamp(0.0, 1.0) * PARTS as f64).round() as u128;
    }

    /// What of the bytes leaves the device.
    pub fn fraction(&self) -> f64 {
        self.fraction as f64 / PARTS as f64
    }

    /// The window in bytes.
    pub fn window(&self) -> u64 {
        self.window_bytes.unwrap_or_else(|| match self.largest_layer {
            0 => self.largest_entry * TENSORS_IN_WINDOW,
            layer => layer.max(self.largest_entry),
        })
    }

    /// A layer begins. Whether a pass begins with it: its number is below that of the layer before. A layer that is
    /// called again and again stays in its pass.
    pub fn enter(&mut self, layer: u32, first: bool) -> bool {
        let begins = first || layer < self.layer;
        if begins {
            self.begin();
        }
        (self.layer, self.layer_start) = (layer, self.total);
        begins
    }

    /// A pass begins: what is saved from here on belongs together, and the choice of tensors starts afresh.
    pub fn begin(&mut self) {
        self.pass += 1;
        self.credit = 0;
    }

    /// A layer has ended.
    pub fn leave(&mut self) {
        self.largest_layer = self.largest_layer.max(self.total - self.layer_start);
    }

    /// The pass that saves belong to at the moment.
    pub fn pass(&self) -> u64 {
        self.pass
    }

    /// A tensor was saved. `may_leave` says that it is one to offload, as far as the fraction allows; one that is not
    /// counted takes no room on the tape and only tells where its use is. `route` is what a plan says about it.
    pub fn save(&mut self, key: Key, may_leave: bool, counted: bool, route: Option<Route>) -> Saved {
        let (save, start) = (self.next, self.total);
        self.next += 1;
        // All of a storage serves for any part of it.
        let known = self.known.get(&key.whole()).or_else(|| self.known.get(&key)).copied();
        let entry = known.unwrap_or(save);
        let (pass, layer) = (self.pass, self.layer);
        let fetch_at = route.map(|route| route.fetch_at);
        self.saves.insert(save, Save { entry, pass, layer, start, fetch_at, uses: 0 });
        if let Some(found) = known.and_then(|entry| self.entries.get_mut(&entry)) {
            found.saves.push(save);
            let (start_bytes, offload) = (found.key.start_bytes, found.location != Location::Kept);
            return Saved { save, entry, start_bytes, new: false, offload };
        }
        if counted {
            self.total += key.bytes;
            self.largest_entry = self.largest_entry.max(key.bytes);
        }
        let offload = may_leave && route.map_or_else(|| self.is_chosen(key.bytes), |route| route.leaves);
        let location = if offload { Location::Leaving } else { Location::Kept };
        self.entries.insert(entry, TapeEntry { key, location, start, pass, route, saves: vec![save] });
        self.known.insert(key, entry);
        if offload {
            let queue = if route.is_some() { &mut self.routed } else { &mut self.leaving };
            queue.push_back(entry);
        }
        Saved { save, entry, start_bytes: key.start_bytes, new: true, offload }
    }

    /// Spreads the fraction evenly: each tensor adds its share to a sum, and leaves if the sum has reached its size.
    fn is_chosen(&mut self, bytes: u64) -> bool {
        self.credit += u128::from(bytes) * self.fraction;
        let price = u128::from(bytes) * PARTS;
        let chosen = self.credit >= price && self.fraction > 0;
        if chosen {
            self.credit -= price;
        }
        chosen
    }

    /// There was no memory for an entry that was chosen to leave: it stays.
    pub fn keep(&mut self, entry: EntryId) {
        self.leaving.retain(|&leaving| leaving != entry);
        self.routed.retain(|&leaving| leaving != entry);
        self.put(entry, Location::Kept);
    }

    /// The oldest entry whose source must be freed now; call again until there is none.
    pub fn due(&mut self) -> Option<EntryId> {
        let window = self.window();
        let &oldest = self.leaving.front()?;
        let start = self.entries.get(&oldest).map_or(0, |entry| entry.start);
        if self.total - start <= window {
            return None;
        }
        self.leaving.pop_front();
        self.put(oldest, Location::Host);
        Some(oldest)
    }

    /// The oldest entry whose route frees its source before `layer` begins; call again until there is none.
    pub fn due_before(&mut self, layer: u32) -> Option<EntryId> {
        let &oldest = self.routed.front()?;
        let is_due = self
            .entries
            .get(&oldest)
            .is_none_or(|entry| entry.pass != self.pass || entry.route.is_none_or(|route| route.free_at <= layer));
        if !is_due {
            return None;
        }
        self.routed.pop_front();
        self.put(oldest, Location::Host);
        Some(oldest)
    }

    /// Entries whose routes have them fetched by now, those used soonest first.
    fn routed_ahead(&mut self, used: Save) -> Vec<EntryId> {
        if self.used.replace((used.pass, used.layer)) == Some((used.pass, used.layer)) {
            return Vec::new();
        }
        let mut found: Vec<EntryId> = Vec::new();
        for other in self.saves.values().rev() {
            if other.pass != used.pass || other.layer > used.layer || other.uses >= used.uses {
                continue;
            }
            let Some(entry) = self.entries.get(&other.entry) else { continue };
            // An entry that several layers share is fetched for the first of them that comes.
            let wanted = other.fetch_at.is_some_and(|layer| layer >= used.layer);
            if wanted && entry.location == Location::Host && other.entry != used.entry && !found.contains(&other.entry)
            {
                found.push(other.entry);
            }
        }
        found
    }

    /// A saved tensor is used.
    pub fn open(&mut self, save: SaveId) -> Option<Opened> {
        let window = self.window();
        let used = {
            let used = self.saves.get_mut(&save)?;
            used.uses += 1;
            *used
        };
        let location = self.entries.get(&used.entry)?.location;
        let mut ahead = self.routed_ahead(used);
        for (_, other) in self.saves.range(..save).rev() {
            if other.pass != used.pass || used.start - other.start > window {
                break;
            }
            if other.uses >= used.uses || other.entry == used.entry || ahead.contains(&other.entry) {
                continue;
            }
            if self
                .entries
                .get(&other.entry)
                .is_some_and(|entry| entry.location == Location::Host && entry.route.is_none())
            {
                ahead.push(other.entry);
            }
        }
        for &entry in &ahead {
            self.put(entry, Location::Arriving);
        }
        if location == Location::Host {
            self.put(used.entry, Location::Arriving);
        }
        let hold = self.entries.get(&used.entry).is_some_and(|entry| {
            entry.saves.iter().filter_map(|id| self.saves.get(id)).any(|other| {
                let soon = match other.fetch_at {
                    Some(layer) => layer >= used.layer,
                    None => other.start.abs_diff(used.start) <= window,
                };
                other.pass == used.pass && other.uses < used.uses && soon
            })
        });
        Some(Opened { entry: used.entry, location, ahead, hold })
    }

    /// An arriving entry may be used on the device from now on.
    pub fn arrived(&mut self, entry: EntryId) {
        self.put(entry, Location::Here);
    }

    /// An entry's fetched bytes were freed, or never came.
    pub fn fetched_freed(&mut self, entry: EntryId) {
        self.put(entry, Location::Host);
    }

    /// Where an entry is.
    pub fn location(&self, entry: EntryId) -> Option<Location> {
        self.entries.get(&entry).map(|entry| entry.location)
    }

    /// An entry's bytes.
    pub fn bytes(&self, entry: EntryId) -> u64 {
        self.entries.get(&entry).map_or(0, |entry| entry.key.bytes)
    }

    /// The layer and the pass that a save was made in.
    pub fn origin(&self, save: SaveId) -> Option<(u32, u64)> {
        self.saves.get(&save).map(|save| (save.layer, save.pass))
    }

    /// A saved tensor is gone; returns its entry if that was the last one of it.
    pub fn release(&mut self, save: SaveId) -> Option<(EntryId, Location)> {
        let Save { entry: id, .. } = self.saves.remove(&save)?;
        let entry = self.entries.get_mut(&id)?;
        entry.saves.retain(|&other| other != save);
        if !entry.saves.is_empty() {
            return None;
        }
        let entry = self.entries.remove(&id)?;
        self.known.remove(&entry.key);
        if entry.location == Location::Leaving {
            self.leaving.retain(|&leaving| leaving != id);
            self.routed.retain(|&leaving| leaving != id);
        }
        Some((id, entry.location))
    }

    fn put(&mut self, entry: EntryId, location: Location) {
        if let Some(entry) = self.entries.get_mut(&entry) {
            entry.location = location;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(storage: u64, bytes: u64) -> Key {
        Key { storage, storage_bytes: bytes, addr: storage << 20, start_bytes: 0, bytes, version: 0 }
    }

    /// Saves tensors of these sizes and frees what is due.
    fn save_all(tape: &mut Tape, sizes: &[u64]) -> Vec<Saved> {
        let first = tape.next;
        let saved = sizes.iter().zip(first..).map(|(&bytes, storage)| {
            let saved = tape.save(key(storage, bytes), true, true, None);
            while tape.due().is_some() {}
            saved
        });
        saved.collect()
    }

    #[test]
    fn a_source_is_freed_a_window_after_it_was_saved() {
        let mut tape = Tape::new(Some(100), 1.0);
        let saved = save_all(&mut tape, &[40, 40, 40, 40]);
        let places: Vec<_> = saved.iter().map(|saved| tape.location(saved.entry).unwrap()).collect();
        assert_eq!(places, [Location::Host, Location::Host, Location::Leaving, Location::Leaving]);
        let kept = tape.save(key(9, 60), false, true, None);
        assert!(!kept.offload);
        assert_eq!(tape.due(), Some(saved[2].entry), "kept bytes move the window too");
        assert_eq!(tape.due(), None);
    }

    #[test]
    fn uses_in_reverse_order_find_everything_fetched_ahead() {
        let mut tape = Tape::new(Some(100), 1.0);
        let saved = save_all(&mut tape, &[40; 6]);
        let mut on_demand = Vec::new();
        for one in saved.iter().rev() {
            let opened = tape.open(one.save).unwrap();
            if opened.location == Location::Host {
                on_demand.push(one.entry);
            }
            if opened.location != Location::Leaving {
                tape.arrived(opened.entry);
                tape.fetched_freed(opened.entry);
            }
            tape.release(one.save);
        }
        assert!(on_demand.is_empty(), "the last ones were still there, the others came in time");
    }

    #[test]
    fn a_shared_entry_is_held_for_its_next_use_and_fetched_once() {
        let mut tape = Tape::new(Some(1000), 1.0);
        tape.enter(0, true);
        let shared = key(77, 50);
        let mut saves = Vec::new();
        for layer in 0..3 {
            tape.enter(layer, false);
            saves.push(tape.save(shared, true, true, None));
            saves.extend(save_all(&mut tape, &[600]));
            tape.leave();
        }
        save_all(&mut tape, &[2000]);
        assert_eq!((saves[0].entry, saves[2].new), (saves[4].entry, false));
        let last = tape.open(saves[4].save).unwrap();
        assert_eq!((last.location, last.hold), (Location::Host, true), "the layer before uses it within a window");
        tape.arrived(last.entry);
        let middle = tape.open(saves[2].save).unwrap();
        assert_eq!((middle.location, middle.hold), (Location::Here, true));
        assert!(!tape.open(saves[0].save).unwrap().hold);
    }

    #[test]
    fn versions_storages_and_ranges_are_told_apart() {
        let mut tape = Tape::new(None, 1.0);
        let first = key(1, 64);
        let same = tape.save(first, true, true, None).entry;
        assert_eq!(tape.save(first, true, true, None).entry, same);
        for other in [
            Key { version: 1, ..first },
            Key { storage: 2, ..first },
            Key { addr: 5, ..first },
            Key { start_bytes: 64, storage_bytes: 128, ..first },
        ] {
            assert_ne!(tape.save(other, true, true, None).entry, same, "{other:?}");
        }
    }

    #[test]
    fn a_part_of_what_has_been_saved_whole_is_not_saved_again() {
        let mut tape = Tape::new(None, 1.0);
        let whole = key(1, 640);
        let part = Key { start_bytes: 64, bytes: 64, ..whole };
        let alone = tape.save(part, true, true, None);
        assert_eq!((alone.start_bytes, alone.new), (64, true));
        let all = tape.save(whole, true, true, None);
        let again = tape.save(part, true, true, None);
        assert_eq!((again.entry, again.start_bytes, again.new), (all.entry, 0, false));
    }

    #[test]
    fn nothing_is_fetched_ahead_from_another_pass() {
        let mut tape = Tape::new(Some(100), 1.0);
        tape.enter(0, true);
        let first = save_all(&mut tape, &[40, 40, 40]);
        tape.enter(1, false);
        assert!(!tape.enter(1, false), "a layer that is called again stays in its pass");
        assert!(tape.enter(0, false), "the first layer again begins a pass");
        let second = save_all(&mut tape, &[40, 40, 40, 40]);
        assert!(tape.open(second[0].save).unwrap().ahead.is_empty());
        assert_eq!(tape.open(first[2].save).unwrap().ahead, [first[1].entry, first[0].entry]);
    }

    #[test]
    fn the_window_follows_the_largest_layer() {
        let mut tape = Tape::new(None, 1.0);
        tape.enter(0, true);
        save_all(&mut tape, &[10, 30]);
        assert_eq!(tape.window(), 120, "four of the largest tensor, before a layer has ended");
        tape.leave();
        assert_eq!(tape.window(), 40);
    }

    #[test]
    fn what_is_not_counted_takes_no_room() {
        let mut tape = Tape::new(Some(50), 1.0);
        let input = save_all(&mut tape, &[40])[0];
        let marks: Vec<_> = (10..20).map(|storage| tape.save(key(storage, 500), false, false, None)).collect();
        assert_eq!((tape.due(), tape.location(input.entry)), (None, Some(Location::Leaving)));
        assert_eq!(tape.open(marks[9].save).unwrap().location, Location::Kept);
    }

    #[test]
    fn routes_say_what_leaves_when_it_is_freed_and_when_it_is_fetched() {
        // A window of one byte would free everything at once.
        let mut tape = Tape::new(Some(1), 1.0);
        let route = |leaves, free_at, fetch_at| Some(Route { leaves, free_at, fetch_at });
        let mut saved = Vec::new();
        let routes = [route(true, 2, 3), route(true, 3, 1), route(false, 3, 3), route(true, 4, 3)];
        for (layer, route) in routes.into_iter().enumerate() {
            tape.enter(layer as u32, layer == 0);
            saved.push(tape.save(key(layer as u64 + 1, 100), true, true, route));
            assert_eq!(tape.due(), None, "routes do not follow the window");
            tape.leave();
            let mut gone = Vec::new();
            while let Some(entry) = tape.due_before(layer as u32 + 1) {
                gone.push(entry);
            }
            let expected: &[EntryId] = match layer {
                1 => &[saved[0].entry],
                2 => &[saved[1].entry],
                3 => &[saved[3].entry],
                _ => &[],
            };
            assert_eq!(gone, expected, "at the end of layer {layer}");
        }
        assert_eq!(tape.location(saved[2].entry), Some(Location::Kept));
        let last = tape.open(saved[3].save).unwrap();
        assert_eq!((last.location, last.ahead), (Location::Host, vec![saved[0].entry]));
        assert!(tape.open(saved[2].save).unwrap().ahead.is_empty());
        let second = tape.open(saved[1].save).unwrap();
        assert_eq!((second.location, second.ahead.len()), (Location::Host, 0), "needed no earlier than now");
        assert_eq!(tape.open(saved[0].save).unwrap().location, Location::Arriving);
    }

    #[test]
    fn what_several_layers_share_is_fetched_for_the_first_and_held_for_the_next() {
        let mut tape = Tape::new(None, 1.0);
        let shared = key(7, 100);
        let mut saves = Vec::new();
        for layer in 0..4u32 {
            tape.enter(layer, layer == 0);
            let route = Some(Route { leaves: true, free_at: layer + 1, fetch_at: (layer + 1).min(3) });
            saves.push(tape.save(shared, true, true, route));
            saves.push(tape.save(key(u64::from(layer) + 10, 50), true, true, route));
            tape.leave();
            while tape.due_before(layer + 1).is_some() {}
        }
        assert!(saves.iter().step_by(2).all(|saved| saved.entry == saves[0].entry));
        for layer in (0..4u32).rev() {
            let (own, other) = (saves[2 * layer as usize + 1], saves[2 * layer as usize]);
            let opened = tape.open(own.save).unwrap();
            assert_eq!(opened.ahead.contains(&other.entry), layer == 3, "once, with the first use of all");
            tape.arrived(own.entry);
            let opened = tape.open(other.save).unwrap();
            assert!(
                matches!(opened.location, Location::Arriving | Location::Here),
                "layer {layer}: {:?}",
                opened.location
            );
            assert_eq!(opened.hold, layer > 0);
            tape.arrived(other.entry);
        }
    }

    #[test]
    fn what_a_pass_left_behind_is_freed_in_the_next() {
        let mut tape = Tape::new(None, 1.0);
        tape.enter(0, true);
        let route = Some(Route { leaves: true, free_at: 9, fetch_at: 0 });
        let left = tape.save(key(1, 10), true, true, route).entry;
        assert_eq!(tape.due_before(1), None);
        tape.enter(0, false);
        assert_eq!(tape.due_before(1), None, "the same layer again is the same pass");
        tape.enter(1, false);
        tape.enter(0, false);
        assert_eq!(tape.due_before(1), Some(left));
    }

    proptest! {
        /// The fraction holds to within one tensor, at any point of a pass, and its ends are exact.
        #[test]
        fn the_fraction_of_bytes_leaves(sizes in prop::collection::vec(1u64..1000, 1..200), fraction in 0.0f64..1.0) {
            for share in [fraction, 0.0, 1.0] {
                let mut tape = Tape::new(None, share);
                let (mut seen, mut left) = (0u64, 0u64);
                for (i, &bytes) in sizes.iter().enumerate() {
                    seen += bytes;
                    left += if tape.save(key(i as u64, bytes), true, true, None).offload { bytes } else { 0 };
                    let wanted = seen as f64 * share;
                    prop_assert!(left as f64 <= wanted + 1e-3, "{left} of {seen} at {share}");
                    prop_assert!(left as f64 > wanted - 1000.0 - 1e-3, "{left} of {seen} at {share}");
                }
                prop_assert!(share != 1.0 || left == seen);
                prop_assert!(share != 0.0 || left == 0);
            }
        }

        /// Whatever is saved and used in whatever order: never more than a window on its way out, never more than a
        /// window fetched ahead at once, every use learns where its bytes are, and nothing is left over.
        #[test]
        fn any_order_keeps_the_window(
            sizes in prop::collection::vec(1u64..100, 1..60),
            window in 1u64..400,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 0..120),
        ) {
            let mut tape = Tape::new(Some(window), 1.0);
            let saved = save_all(&mut tape, &sizes);
            let out: u64 = tape.leaving.iter().map(|&entry| tape.bytes(entry)).sum();
            prop_assert!(out <= window);
            for pick in &picks {
                let one = saved[pick.index(saved.len())];
                let opened = tape.open(one.save).unwrap();
                prop_assert_eq!(opened.entry, one.entry);
                prop_assert!(opened.ahead.iter().map(|&entry| tape.bytes(entry)).sum::<u64>() <= window);
                prop_assert!(opened.ahead.iter().all(|&entry| tape.location(entry) == Some(Location::Arriving)));
                prop_assert!(!opened.ahead.contains(&one.entry));
                if !matches!(opened.location, Location::Kept | Location::Leaving) {
                    tape.arrived(one.entry);
                    if !opened.hold {
                        tape.fetched_freed(one.entry);
                    }
                }
            }
            for one in &saved {
                prop_assert!(tape.release(one.save).is_some());
                prop_assert!(tape.release(one.save).is_none(), "once only");
            }
            prop_assert!(tape.entries.is_empty() && tape.known.is_empty() && tape.saves.is_empty());
            prop_assert!(tape.leaving.is_empty());
        }
    }
}
