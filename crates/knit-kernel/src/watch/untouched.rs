//! Whether anybody else changed our tables since we last looked at them, without reading them.
//!
//! Two things say so. The kernel counts the changes to all rules of a namespace, whoever makes them: as long
//! as the count is the one at which the tables were as we made them, they still are. And it tells of each
//! change, with the table and the socket that made it: if all was heard up to the present count and none of
//! it was a stranger's change of our tables, they are as we made them, whatever others did to theirs. Where
//! neither is certain, the tables are to be read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use knit_nft::Generation;

use super::{Listen, News, Watcher};
use crate::netns::{NetNs, NsId};

/// The kernel tells of a transaction before it ends; so long may the thread take that listens, on a busy
/// machine.
const CATCH_UP_TIMEOUT: Duration = Duration::from_millis(100);

/// What is known of what others do to tables of one name.
#[derive(Debug, Default)]
pub struct Untouched {
    heard: Option<Heard>,
    /// The state of the rule set at which the tables were as we made them.
    as_made: Option<Generation>,
}

#[derive(Debug)]
struct Heard {
    namespace: NsId,
    watcher: Watcher,
    /// Somebody changed the tables since we began to look at them.
    touched: Arc<AtomicBool>,
}

impl Untouched {
    /// Listens from now on; `tell` is called when somebody else changes a table of this name. Without it only
    /// the count says something.
    ///
    /// # Errors
    /// When the kernel gives no sockets there, or there is no thread.
    pub fn watch(
        &mut self,
        namespace: &NetNs,
        table: &str,
        tell: Box<dyn Fn() + Send>,
    ) -> std::io::Result<()> {
        let touched = Arc::new(AtomicBool::new(false));
        let (flag, table) = (Arc::clone(&touched), table.to_owned());
        let hear = move |_, news| {
            let ours = match news {
                News::Table(id) => *id.name == *table,
                News::Network => false,
                // That is nobody's doing, but what it was nobody knows.
                News::Lost => true,
            };
            if ours {
                flag.store(true, Ordering::Release);
                tell();
            }
        };
        let watcher = Watcher::start(hear)?;
        watcher.add(namespace, Listen::Tables).map_err(std::io::Error::other)?;
        self.heard = Some(Heard { namespace: namespace.id(), watcher, touched });
        Ok(())
    }

    /// The tables are about to be read, or are not known any more.
    pub fn looking(&mut self) {
        self.as_made = None;
        if let Some(heard) = &self.heard {
            heard.touched.store(false, Ordering::Release);
        }
    }

    /// They are as we want them, at this state of the rule set if it is known.
    pub fn looked(&mut self, at: Option<Generation>) {
        self.as_made = at;
    }

    /// We changed them without looking.
    pub fn written(&mut self) {
        self.as_made = None;
    }

    /// Whether nobody else changed the tables, if this is the state of the rule set.
    #[must_use]
    pub fn left_alone(&self, now: Generation) -> bool {
        if self.as_made == Some(now) {
            return true;
        }
        // In this order: what was heard up to there has been told.
        let all_heard = |heard: &&Heard| heard.watcher.catch_up(heard.namespace, now, CATCH_UP_TIMEOUT);
        self.heard.as_ref().filter(all_heard).is_some_and(|heard| !heard.touched.load(Ordering::Acquire))
    }
}
