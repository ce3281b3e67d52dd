//! A text that is made again only when it is no longer fresh.

use std::time::Duration;

use hyper::body::Bytes;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long the same text is shown again: to make numbers is work that grows with the node, to show them is
/// not.
const FRESH: Duration = Duration::from_secs(1);

/// A text that is made again only when it is no longer fresh, and by one client at a time.
#[derive(Debug, Default)]
pub struct Cached {
    text: Mutex<Option<(Instant, Bytes)>>,
}

impl Cached {
    /// The text, as fresh as it must be.
    pub async fn get<F: Future<Output = String>>(&self, make: impl FnOnce() -> F) -> Bytes {
        let mut text = self.text.lock().await;
        match &*text {
            Some((made, known)) if made.elapsed() < FRESH => known.clone(),
            _ => {
                let new = Bytes::from(make().await);
                *text = Some((Instant::now(), new.clone()));
                new
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn numbers_are_made_once_a_second_however_often_they_are_asked_for() {
        let (cached, mut made) = (Cached::default(), 0);
        for _ in 0..1000 {
            let text = cached.get(|| {
                made += 1;
                ready(made.to_string())
            });
            text.await;
        }
        assert_eq!(made, 1);
        tokio::time::advance(FRESH).await;
        assert_eq!(cached.get(|| ready("new".to_owned())).await, "new");
    }
}
