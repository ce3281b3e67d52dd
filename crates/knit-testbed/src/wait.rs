//! Waiting for a condition in async code. In other code it is `knit_kernel::testing::eventually`, or
//! `find_eventually` there.

use std::panic::Location;
use std::time::Duration;

use tokio::time::Instant;

/// Asks `look` until it succeeds, and returns what it found; fails the test with what it said last if it does
/// not within `limit`.
#[track_caller]
pub fn eventually<T, E: std::fmt::Debug>(
    what: impl Into<String>,
    limit: Duration,
    mut look: impl FnMut() -> Result<T, E>,
) -> impl Future<Output = T> {
    let (what, caller) = (what.into(), Location::caller());
    ask_until(what, caller, limit, move || std::future::ready(look()))
}

/// Waits until a condition holds that has to be asked for, for a minute at most.
#[track_caller]
pub fn holds_when_asked<F: Future<Output = bool>>(
    what: &str,
    mut condition: impl FnMut() -> F,
) -> impl Future<Output = ()> {
    let look = move || {
        let asked = condition();
        async move { if asked.await { Ok(()) } else { Err("it does not hold") } }
    };
    ask_until(what.to_owned(), Location::caller(), Duration::from_secs(60), look)
}

async fn ask_until<T, E: std::fmt::Debug, F: Future<Output = Result<T, E>>>(
    what: String,
    caller: &'static Location<'static>,
    limit: Duration,
    mut look: impl FnMut() -> F,
) -> T {
    let end = Instant::now() + limit;
    loop {
        match look().await {
            Ok(found) => return found,
            Err(last) => {
                assert!(Instant::now() < end, "{caller}: {what}: not within {limit:?}: {last:?}");
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until a condition holds that another task brings about, for a minute at most.
#[track_caller]
pub fn holds(what: &str, mut condition: impl FnMut() -> bool) -> impl Future<Output = ()> {
    let look = move || if condition() { Ok(()) } else { Err("it does not hold") };
    eventually(what, Duration::from_secs(60), look)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_ends_with_the_condition() {
        let mut left = 3;
        let look = || {
            left -= 1;
            if left == 0 { Ok(()) } else { Err(left) }
        };
        eventually("none is left", Duration::from_secs(1), look).await;
        assert_eq!(left, 0);
    }

    #[tokio::test(start_paused = true)]
    #[should_panic(expected = "never: not within 1s: \"still not\"")]
    async fn it_fails_with_what_was_said_last() {
        eventually("never", Duration::from_secs(1), || Err::<(), _>("still not")).await;
    }
}
