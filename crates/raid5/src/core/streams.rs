//! [`Streams`]: where writes of an array follow one another.

/// Streams that are known at a time.
const MOST: usize = 32;

#[derive(Clone, Copy)]
struct Stream {
    end: u64,
    sectors: u64,
    writes: u64,
    used: u64,
}

impl Stream {
    /// True if it is long enough for more to be expected.
    fn is_long(&self, row_sectors: u64) -> bool {
        self.writes >= 4 || (self.writes > 2 && self.sectors >= row_sectors)
    }
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Streams {
    all: Vec<Stream>,
    writes: u64,
}

impl Streams {
    /// A write of the array's sectors begins: does it go on where another one ended?
    pub fn note(&mut self, sector: u64, sectors: u64) {
        self.writes += 1;
        let used = self.writes;
        // Once it is a stream, a little out of order is in order still; before, that may be chance.
        let is_near = |stream: &&mut Stream| {
            let gap = if stream.writes < 4 { 0 } else { 256 };
            sector >= stream.end && sector - stream.end <= gap
        };
        let end = sector + sectors;
        if let Some(stream) = self.all.iter_mut().find(is_near) {
            stream.end = end;
            stream.sectors += sectors;
            stream.writes += 1;
            stream.used = used;
            return;
        }
        let new = Stream {
            end,
            sectors,
            writes: 1,
            used,
        };
        if self.all.len() < MOST {
            self.all.push(new);
        } else if let Some(oldest) = self.all.iter_mut().min_by_key(|stream| stream.used) {
            *oldest = new;
        }
    }

    /// Rows that streams are in at the moment: more will come for their stripes soon.
    pub fn rows(&self, row_sectors: u64) -> Vec<u64> {
        let long = self.all.iter().filter(|stream| stream.is_long(row_sectors));
        let inside = long.filter(|stream| stream.end % row_sectors != 0);
        inside.map(|stream| stream.end / row_sectors).collect()
    }
}
