//! Requests of the copy engine: in a stack, as the paper's engine had them (section V.B), or in the real engine's
//! queues.

use baton_copy::{CopySettings, Engine, Kind};

/// Requests that wait at most.
pub const ROOM: usize = 4096;

/// Where requests wait.
#[derive(Clone, Copy, Debug)]
pub enum Order {
    /// Last in, first out.
    Stack,
    /// The real engine.
    Turns,
}

impl Order {
    /// Both, with their names in tables and figures.
    pub const BOTH: [(&'static str, Order); 2] = [("stack", Order::Stack), ("queues in turn", Order::Turns)];
}

/// Requests that wait.
pub enum Requests<T> {
    /// See [`Order::Stack`].
    Stack(Vec<T>),
    /// See [`Order::Turns`].
    Turns(Engine<T>),
}

impl<T> Requests<T> {
    /// None yet, of so many workers.
    pub fn new(order: Order, workers: usize) -> Requests<T> {
        match order {
            Order::Stack => Requests::Stack(Vec::with_capacity(ROOM)),
            Order::Turns => {
                Requests::Turns(Engine::new(workers, CopySettings { room: ROOM / workers, ..CopySettings::default() }))
            }
        }
    }

    /// Adds a worker's.
    ///
    /// # Errors
    /// The request, if there is no room.
    pub fn push(&mut self, worker: usize, item: T, bytes: usize, kind: Kind) -> Result<(), T> {
        match self {
            Requests::Stack(stack) if stack.len() >= ROOM => Err(item),
            Requests::Stack(stack) => {
                stack.push(item);
                Ok(())
            }
            Requests::Turns(engine) => engine.push(worker, item, bytes, kind),
        }
    }

    /// Takes the next one.
    pub fn pop(&mut self) -> Option<T> {
        match self {
            Requests::Stack(stack) => stack.pop(),
            Requests::Turns(engine) => engine.pop().map(|(_, item)| item),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_buries_what_came_first_and_turns_do_not() {
        let orders = Order::BOTH.map(|(_, order)| {
            let mut requests = Requests::new(order, 2);
            for item in 0..4 {
                requests.push(0, item, 1514, Kind { sets_up: false, connection: 1 }).unwrap();
            }
            requests.push(1, 4, 74, Kind { sets_up: true, connection: 2 }).unwrap();
            requests.push(0, 5, 1514, Kind { sets_up: false, connection: 1 }).unwrap();
            std::iter::from_fn(|| requests.pop()).collect::<Vec<_>>()
        });
        assert_eq!(orders, [vec![5, 4, 3, 2, 1, 0], vec![4, 0, 1, 2, 3, 5]]);
    }

    #[test]
    fn there_is_room_for_so_many() {
        for (name, order) in Order::BOTH {
            let mut requests = Requests::new(order, 1);
            let data = Kind { sets_up: false, connection: 1 };
            assert!((0..ROOM).all(|item| requests.push(0, item, 1514, data).is_ok()), "{name}");
            assert_eq!(requests.push(0, ROOM, 1514, data), Err(ROOM), "{name}");
        }
    }
}
