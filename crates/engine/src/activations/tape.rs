//! The order of things: what was saved, in which order, where each is now, and what will be wanted next.
//!
//! Pure: no device, no memory, no time. The same calls give the same answers, so what travels and when sources are let
//! go depends on the program alone and never on how fast anything ran.
//!
//! Each saved tensor is a *save*; a storage at one version is an *entry*, shared by all saves of it. Saves lie on the
//! tape in the order of the forward pass, each at the number of bytes saved before it. Distances on the tape are bytes,
//! of kept and offloaded tensors alike, and the *window* is one such distance:
//! - a source is let go when more than a window has been saved from it on;
//! - a use of a save at some place asks for the entries up to a window before it.
//!
//! So at most a window's bytes are held back from leaving and at most a window's bytes have arrived early, and both
//! follow the computation: where half of the bytes are kept, half a window is in flight.

use std::collections::{BTreeMap, HashMap};

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
    /// Where its memory is.
    pub addr: u64,
    /// The range of it that is saved.
    pub start_bytes: u64,
    /// Length of that range.
    pub bytes: u64,
    /// How often it has been changed.
    pub version: u64,
}

/// Where an entry's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
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
struct Entry {
    key: Key,
    place: Place,
    /// Bytes saved before it.
    start: u64,
    saves: Vec<SaveId>,
}

#[derive(Debug, Clone, Copy)]
struct Save {
    entry: EntryId,
    pass: u64,
    layer: u32,
    /// Bytes saved before it.
    start: u64,
    uses: u32,
}

/// The answer to a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// The save's number.
    pub save: SaveId,
    /// The entry it belongs to.
    pub entry: EntryId,
    /// Whether the entry is new.
    pub new: bool,
    /// Whether the entry is to leave the device (new entries), or has (known ones).
    pub offload: bool,
}

/// The answer to a use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opened {
    /// The entry that is wanted.
    pub entry: EntryId,
    /// Where it was: at [`Place::Host`] it has to be fetched now.
    pub place: Place,
    /// Entries to fetch ahead, soonest first. They count as arriving from now on.
    pub ahead: Vec<EntryId>,
    /// Whether the bytes on the device will be wanted again soon.
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
    entries: HashMap<EntryId, Entry>,
    known: HashMap<Key, EntryId>,
    saves: BTreeMap<SaveId, Save>,
    /// Entries on their way out, oldest first.
    leaving: std::collections::VecDeque<EntryId>,
    next: u64,
    total: u64,
    pass: u64,
    layer: u32,
    layer_start: u64,
    largest_layer: u64,
    largest_entry: u64,
}

/// While no layer has been seen to its end, the window is so many of the largest tensors.
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
            leaving: std::collections::VecDeque::new(),
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
    /// counted takes no room on the tape and only tells where its use is.
    pub fn save(&mut self, key: Key, may_leave: bool, counted: bool) -> Saved {
        let (save, start) = (self.next, self.total);
        self.next += 1;
        let known = self.known.get(&key).copied();
        let entry = known.unwrap_or(save);
        let (pass, layer) = (self.pass, self.layer);
        self.saves.insert(save, Save { entry, pass, layer, start, uses: 0 });
        if let Some(found) = known.and_then(|entry| self.entries.get_mut(&entry)) {
            found.saves.push(save);
            return Saved { save, entry, new: false, offload: found.place != Place::Kept };
        }
        if counted {
            self.total += key.bytes;
            self.largest_entry = self.largest_entry.max(key.bytes);
        }
        let offload = may_leave && self.is_chosen(key.bytes);
        let place = if offload { Place::Leaving } else { Place::Kept };
        self.entries.insert(entry, Entry { key, place, start, saves: vec![save] });
        self.known.insert(key, entry);
        if offload {
            self.leaving.push_back(entry);
        }
        Saved { save, entry, new: true, offload }
    }

    /// Spreads the fraction evenly: each tensor adds its share, and one leaves when its own size has come together.
    fn is_chosen(&mut self, bytes: u64) -> bool {
        self.credit += u128::from(bytes) * self.fraction;
        let price = u128::from(bytes) * PARTS;
        let chosen = self.credit >= price && self.fraction > 0;
        if chosen {
            self.credit -= price;
        }
        chosen
    }

    /// There was no memory for an entry that was to leave: it stays.
    pub fn keep(&mut self, entry: EntryId) {
        self.leaving.retain(|&leaving| leaving != entry);
        self.put(entry, Place::Kept);
    }

    /// The oldest entry whose source is to be let go now; call again until there is none.
    pub fn due(&mut self) -> Option<EntryId> {
        let window = self.window();
        let &oldest = self.leaving.front()?;
        let start = self.entries.get(&oldest).map_or(0, |entry| entry.start);
        if self.total - start <= window {
            return None;
        }
        self.leaving.pop_front();
        self.put(oldest, Place::Host);
        Some(oldest)
    }

    /// A saved tensor is used.
    pub fn open(&mut self, save: SaveId) -> Option<Opened> {
        let window = self.window();
        let used = {
            let used = self.saves.get_mut(&save)?;
            used.uses += 1;
            *used
        };
        let place = self.entries.get(&used.entry)?.place;
        let mut ahead = Vec::new();
        for (_, other) in self.saves.range(..save).rev() {
            if other.pass != used.pass || used.start - other.start > window {
                break;
            }
            if other.uses >= used.uses || other.entry == used.entry || ahead.contains(&other.entry) {
                continue;
            }
            if self.entries.get(&other.entry).is_some_and(|entry| entry.place == Place::Host) {
                ahead.push(other.entry);
            }
        }
        for &entry in &ahead {
            self.put(entry, Place::Arriving);
        }
        if place == Place::Host {
            self.put(used.entry, Place::Arriving);
        }
        let hold = self.entries.get(&used.entry).is_some_and(|entry| {
            entry.saves.iter().filter_map(|id| self.saves.get(id)).any(|other| {
                other.pass == used.pass && other.uses < used.uses && other.start.abs_diff(used.start) <= window
            })
        });
        Some(Opened { entry: used.entry, place, ahead, hold })
    }

    /// An arriving entry may be used on the device from now on.
    pub fn arrived(&mut self, entry: EntryId) {
        self.put(entry, Place::Here);
    }

    /// An entry's bytes on the device were let go, or never came.
    pub fn let_go(&mut self, entry: EntryId) {
        self.put(entry, Place::Host);
    }

    /// Where an entry is.
    pub fn place(&self, entry: EntryId) -> Option<Place> {
        self.entries.get(&entry).map(|entry| entry.place)
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
    pub fn release(&mut self, save: SaveId) -> Option<(EntryId, Place)> {
        let Save { entry: id, .. } = self.saves.remove(&save)?;
        let entry = self.entries.get_mut(&id)?;
        entry.saves.retain(|&other| other != save);
        if !entry.saves.is_empty() {
            return None;
        }
        let entry = self.entries.remove(&id)?;
        self.known.remove(&entry.key);
        if entry.place == Place::Leaving {
            self.leaving.retain(|&leaving| leaving != id);
        }
        Some((id, entry.place))
    }

    fn put(&mut self, entry: EntryId, place: Place) {
        if let Some(entry) = self.entries.get_mut(&entry) {
            entry.place = place;
        }
    }
}
