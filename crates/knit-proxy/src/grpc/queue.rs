//! What one watcher has yet to be sent, bounded in bytes: a watcher that does not read costs no more than
//! that.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use knit_types::sync::Locked;
use prost::Message as _;

use super::proto::WatchResponse;

/// Messages that belong together, shared by all watchers that have yet to be sent them.
#[derive(Clone)]
pub(super) struct Batch {
    messages: Arc<[WatchResponse]>,
    bytes: usize,
}

/// The batches of one watcher. The feeder pushes, the watcher's stream polls.
pub(super) struct Queue {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    batches: VecDeque<Batch>,
    bytes: usize,
    /// It fell behind; it is told so, and nothing is kept for it any more.
    overrun: bool,
    waker: Option<Waker>,
}

/// The watcher fell too far behind.
#[derive(Debug)]
pub(super) struct Overrun;

impl Batch {
    pub(super) fn new(messages: Vec<WatchResponse>) -> Self {
        // A message takes some room of its own, however short it is.
        let size = |message: &WatchResponse| size_of::<WatchResponse>() + message.encoded_len();
        let bytes = messages.iter().map(size).sum();
        Self { messages: messages.into(), bytes }
    }

    pub(super) fn get(&self, index: usize) -> Option<&WatchResponse> {
        self.messages.get(index)
    }
}

impl Queue {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::default() }
    }

    /// Adds a batch; `false` if the watcher has fallen too far behind to be sent any more. A batch that is
    /// alone is never too large: it is what there is to say.
    pub(super) fn push(&self, batch: &Batch) -> bool {
        let mut state = self.lock();
        if !state.batches.is_empty() && state.bytes + batch.bytes > self.limit {
            state.batches = VecDeque::new();
            state.bytes = 0;
            state.overrun = true;
        } else {
            state.bytes += batch.bytes;
            state.batches.push_back(batch.clone());
        }
        if let Some(waker) = state.waker.take() {
            waker.wake();
        }
        !state.overrun
    }

    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<Batch, Overrun>> {
        let mut state = self.lock();
        if state.overrun {
            return Poll::Ready(Err(Overrun));
        }
        if let Some(batch) = state.batches.pop_front() {
            state.bytes -= batch.bytes;
            return Poll::Ready(Ok(batch));
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it holds the lock.
        self.state.locked()
    }
}

#[cfg(test)]
mod tests {
    use super::super::proto::{Sync, watch_response::Op};
    use super::*;

    fn batch(revision: u64) -> Batch {
        let sync = Sync { revision, triggered_ms: vec![revision; 100] };
        Batch::new(vec![WatchResponse { op: Some(Op::Sync(sync)) }])
    }

    fn poll(queue: &Queue) -> Poll<Result<Batch, Overrun>> {
        queue.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_queue_holds_its_limit_and_then_nothing() {
        let one = batch(1).bytes;
        let queue = Queue::new(3 * one);
        for _ in 0..3 {
            assert!(queue.push(&batch(1)));
        }
        assert!(!queue.push(&batch(1)), "the fourth does not fit");
        assert_eq!(queue.lock().batches.len(), 0, "nothing is kept for a watcher that must start again");
        assert!(matches!(poll(&queue), Poll::Ready(Err(Overrun))));
        assert!(!queue.push(&batch(1)), "and it stays that way");
    }

    #[test]
    fn what_was_taken_makes_room_and_one_batch_always_fits() {
        let queue = Queue::new(1);
        assert!(poll(&queue).is_pending());
        for _ in 0..10 {
            assert!(queue.push(&batch(7)), "a batch that is alone is never too large");
            assert!(matches!(poll(&queue), Poll::Ready(Ok(_))));
        }
        assert_eq!(queue.lock().bytes, 0);
    }
}
