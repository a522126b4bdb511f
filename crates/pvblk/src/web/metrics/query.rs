//! [`Query`]: the parameters of `/metrics`.

use super::buckets::Buckets;
use pvblk_block::trace::MOST_EVERY;

/// Few enough that following them costs next to nothing.
const SOME: u32 = 64;

/// The wishes of a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Query {
    pub buckets: Buckets,
    /// One request in so many is followed for the hops; `None`: none for this reader.
    pub hops: Option<u32>,
}

impl Default for Query {
    fn default() -> Query {
        Query {
            buckets: Buckets::Active,
            hops: Some(SOME),
        }
    }
}

impl Query {
    /// Of the pairs after the `?`. An error says in one line what to write.
    pub fn parse(pairs: &[(String, String)]) -> Result<Query, String> {
        let mut query = Query::default();
        for (name, value) in pairs {
            match name.as_str() {
                "buckets" => {
                    let buckets = Buckets::parse(value);
                    let why = "buckets: write active, all or none";
                    query.buckets = buckets.ok_or_else(|| why.to_owned())?;
                }
                "hops" => query.hops = hops(value)?,
                _ => return Err("the parameters are buckets and hops".into()),
            }
        }
        Ok(query)
    }
}

fn hops(value: &str) -> Result<Option<u32>, String> {
    if value == "none" {
        return Ok(None);
    }
    let every = value.parse().ok().filter(|n| (1..=MOST_EVERY).contains(n));
    let why = || {
        format!(
            "hops: write none, or a number from 1 to {MOST_EVERY}: one request in so many is followed"
        )
    };
    every.map(Some).ok_or_else(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read() {
        let of = |text: &str| {
            let pairs = pvblk_web::decode_query(text).unwrap();
            Query::parse(&pairs)
        };
        assert_eq!(of(""), Ok(Query::default()));
        let all = Query {
            buckets: Buckets::All,
            hops: None,
        };
        assert_eq!(of("buckets=all&hops=none"), Ok(all));
        assert_eq!(of("hops=1").unwrap().hops, Some(1));
        for (wrong, why) in [
            ("buckets=some", "active, all or none"),
            ("hops=0", "a number from 1"),
            ("hops=-1", "a number from 1"),
            ("hops=", "a number from 1"),
            ("hop=1", "buckets and hops"),
        ] {
            assert!(of(wrong).unwrap_err().contains(why), "{wrong}");
        }
        assert!(of(&format!("hops={}", MOST_EVERY + 1)).is_err());
    }
}
