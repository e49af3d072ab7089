//! A second copy of an optimizer's pinned state, for steps that may be taken back: see `sides.rs`.

use super::{Optimizer, StateTable};
use crate::error::Result;

impl Optimizer {
    /// Pins a second copy of all state, now and for tables that are added later. What the copy holds is unspecified. The
    /// budget is checked before anything is pinned; an error names the bytes of both copies. Nothing happens if there is
    /// a second copy already.
    pub fn open_second(&self) -> Result<()> {
        let mut inner = self.open()?;
        if inner.second {
            return Ok(());
        }
        self.memory.budget().check_second(inner.tables.iter().map(|table| table.pinned_bytes()).sum())?;
        for (index, table) in inner.tables.iter().enumerate() {
            if let Err(error) = table.open_second(&self.memory) {
                // The reason says more than a failure to undo it.
                let _ = inner.tables[..index].iter().try_for_each(|table| table.close_second());
                return Err(error);
            }
        }
        inner.second = true;
        Ok(())
    }

    /// Waits for every store and frees the copy that is not current.
    pub fn close_second(&self) -> Result<()> {
        let mut inner = self.open()?;
        inner.drain()?;
        inner.tables.iter().try_for_each(|table| table.close_second())?;
        inner.second = false;
        Ok(())
    }

    /// Whether there is a second copy.
    pub fn has_second(&self) -> bool {
        self.lock().second
    }

    /// A number that grows whenever a column or a step counter has moved: regions from [`Self::column`] and
    /// [`Self::step_counter`] are those of the number from before the call.
    pub fn generation(&self) -> u64 {
        self.lock().tables.iter().map(|table| table.generation()).sum()
    }

    /// Makes the other copy of all state the current one, whatever it holds, for tests.
    #[doc(hidden)]
    pub fn exchange(&self) -> Result<()> {
        let inner = self.open()?;
        inner.tables.iter().filter(|table| !table.is_resident()).try_for_each(|table| StateTable::exchange(table))
    }
}
