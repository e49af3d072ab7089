//! Sets of time: sorted intervals that do not touch, in nanoseconds.

/// Intervals in order, each one ends before the next begins.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Intervals(Vec<(i64, i64)>);

impl FromIterator<(i64, i64)> for Intervals {
    /// The union of intervals in any order.
    fn from_iter<I: IntoIterator<Item = (i64, i64)>>(given: I) -> Self {
        let mut sorted: Vec<(i64, i64)> = given.into_iter().filter(|(begin, end)| begin < end).collect();
        sorted.sort_unstable();
        let mut union = Vec::<(i64, i64)>::with_capacity(sorted.len());
        for (begin, end) in sorted {
            match union.last_mut() {
                Some(last) if begin <= last.1 => last.1 = last.1.max(end),
                _ => union.push((begin, end)),
            }
        }
        Self(union)
    }
}

impl Intervals {
    /// What is in either.
    pub(crate) fn or(&self, other: &Self) -> Self {
        self.0.iter().chain(&other.0).copied().collect()
    }

    /// What is in both.
    pub(crate) fn and(&self, other: &Self) -> Self {
        let (mut left, mut right) = (self.0.as_slice(), other.0.as_slice());
        let mut both = Vec::new();
        while let (Some(&a), Some(&b)) = (left.first(), right.first()) {
            let (begin, end) = (a.0.max(b.0), a.1.min(b.1));
            if begin < end {
                both.push((begin, end));
            }
            if a.1 <= b.1 { left = &left[1..] } else { right = &right[1..] }
        }
        Self(both)
    }

    /// The part from `begin` to `end`.
    pub(crate) fn within(&self, begin: i64, end: i64) -> Self {
        let first = self.0.partition_point(|interval| interval.1 <= begin);
        let after = self.0.partition_point(|interval| interval.0 < end).max(first);
        Self(self.0[first..after].iter().map(|interval| (interval.0.max(begin), interval.1.min(end))).collect())
    }

    pub(crate) fn seconds(&self) -> f64 {
        self.0.iter().map(|(begin, end)| end - begin).sum::<i64>() as f64 / 1e9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(given: &[(i64, i64)]) -> Intervals {
        given.iter().copied().collect()
    }

    #[test]
    fn a_union_has_each_moment_once() {
        assert_eq!(of(&[(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]).0, [(0, 4), (5, 7)]);
        assert_eq!(of(&[(0, 2)]).or(&of(&[(1, 5)])).0, [(0, 5)]);
        assert_eq!(of(&[(0, 10), (2, 3)]).seconds(), 10e-9);
    }

    #[test]
    fn an_intersection_has_what_is_in_both() {
        let left = of(&[(0, 4), (6, 10)]);
        assert_eq!(left.and(&of(&[(3, 7), (8, 9), (20, 30)])).0, [(3, 4), (6, 7), (8, 9)]);
        assert_eq!(left.and(&of(&[(4, 6)])).0, []);
        assert_eq!(left.within(2, 7).0, [(2, 4), (6, 7)]);
        assert_eq!(left.within(4, 6).0, []);
        assert_eq!(left.within(-5, 50), left);
        assert_eq!(left.within(9, 2).0, []);
    }
}
