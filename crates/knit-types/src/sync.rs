//! Locks that others can still take after a thread has panicked while it held one.
//!
//! The standard library's locks are poisoned by that, and refuse everybody from then on. A long-running
//! program that has to keep what it runs in order is better off going on: whoever holds one of its locks does
//! so for a step that leaves the state whole, or has it compared with the kernel and repaired later.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A [`Mutex`] that is taken whether or not somebody panicked while holding it.
pub trait Locked<T: ?Sized> {
    /// Waits for the lock and takes it.
    fn locked(&self) -> MutexGuard<'_, T>;
}

/// A [`RwLock`] that is taken whether or not somebody panicked while holding it.
pub trait ReadWrite<T: ?Sized> {
    /// Waits until nobody writes, and shares it with others who read.
    fn reading(&self) -> RwLockReadGuard<'_, T>;

    /// Waits until it is free, and has it alone.
    fn writing(&self) -> RwLockWriteGuard<'_, T>;
}

impl<T: ?Sized> Locked<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> ReadWrite<T> for RwLock<T> {
    fn reading(&self) -> RwLockReadGuard<'_, T> {
        self.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> RwLockWriteGuard<'_, T> {
        self.write().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_one_thread_shuts_nobody_out() {
        let (mutex, rwlock) = (Mutex::new(1), RwLock::new(1));
        let panicked = std::thread::scope(|scope| {
            let holder = || {
                let (_mutex, _rwlock) = (mutex.lock(), rwlock.write());
                std::panic::resume_unwind(Box::new("as planned"));
            };
            scope.spawn(holder).join().is_err()
        });
        assert!(panicked && mutex.is_poisoned() && rwlock.is_poisoned());
        *mutex.locked() += 1;
        *rwlock.writing() += 1;
        assert_eq!((*mutex.locked(), *rwlock.reading()), (2, 2));
    }
}
