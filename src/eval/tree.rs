//! Draft trees (DDTree, arXiv 2604.12989): best-first expansion over the summed log-probabilities of the
//! slots' marginals, up to a budget of nodes.
//!
//! A path of the tree is a list of ranks: which of a slot's tokens, best first, stands at each depth. Among
//! paths of equal score the lexicographically smaller rank path comes first; among tokens of equal logit the
//! smaller id ranks first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

/// A drafted token of a tree. Node `i` of the list has number `i + 1`; 0 is the root, the anchor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TreeNode {
    /// Its token.
    pub token: u32,
    /// Number of its parent.
    pub parent: u32,
    /// Its slot: 1 for a child of the root.
    pub depth: u32,
}

/// The most likely tokens of each slot of a block, best first: `[depths, width]`.
#[derive(Clone, Copy, Debug)]
pub struct SlotRanks<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// Their log-probabilities.
    pub log_probs: &'a [f32],
    /// Tokens of a slot; `min(budget, V)` are as good as all.
    pub width: usize,
}

impl SlotRanks<'_> {
    fn log_prob(&self, depth: usize, rank: usize) -> f64 {
        f64::from(self.log_probs[(depth - 1) * self.width + rank])
    }
}

/// A path that may become a node.
struct Candidate {
    /// Minus the summed log-probability.
    cost: f64,
    ranks: Vec<u32>,
    parent: u32,
}

impl Ord for Candidate {
    /// Greater is popped first: less cost, then the smaller rank path. The zero makes −0 and 0 equal.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.cost + 0.0)
            .total_cmp(&(self.cost + 0.0))
            .then_with(|| other.ranks.cmp(&self.ranks))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

/// Builds the tree of at most `budget` nodes; a parent always stands before its children.
pub fn build_tree(slots: SlotRanks<'_>, budget: usize) -> Vec<TreeNode> {
    let depths = slots.ids.len().checked_div(slots.width).unwrap_or(0);
    let mut nodes = Vec::with_capacity(budget);
    let mut heap = BinaryHeap::new();
    if depths > 0 {
        heap.push(Candidate {
            cost: -slots.log_prob(1, 0),
            ranks: vec![0],
            parent: 0,
        });
    }
    while nodes.len() < budget {
        let Some(Candidate {
            cost,
            ranks,
            parent,
        }) = heap.pop()
        else {
            break;
        };
        let depth = ranks.len();
        let rank = ranks[depth - 1] as usize;
        nodes.push(TreeNode {
            token: slots.ids[(depth - 1) * slots.width + rank],
            parent,
            depth: depth as u32,
        });
        // The first child, and the sibling of the next rank: every path is reached once, after its betters.
        if depth < depths {
            let mut child = ranks.clone();
            child.push(0);
            heap.push(Candidate {
                cost: cost - slots.log_prob(depth + 1, 0),
                ranks: child,
                parent: nodes.len() as u32,
            });
        }
        if rank + 1 < slots.width {
            let here = slots.log_prob(depth, rank);
            let next = slots.log_prob(depth, rank + 1);
            let mut sibling = ranks;
            sibling[depth - 1] += 1;
            heap.push(Candidate {
                cost: cost + here - next,
                ranks: sibling,
                parent,
            });
        }
    }
    nodes
}

/// How many tokens of `truth` lie on a path of the tree that starts at the root.
pub fn depth_of(nodes: &[TreeNode], truth: &[u32]) -> usize {
    let mut at = 0;
    let mut depth = 0;
    // Children stand behind their parents, so one pass follows the whole path.
    for (i, node) in nodes.iter().enumerate() {
        if node.parent == at && truth.get(depth) == Some(&node.token) {
            at = i as u32 + 1;
            depth += 1;
        }
    }
    depth
}

/// The `width` most likely tokens of a slot and their log-probabilities, from its logits; for checks on a host.
pub fn rank_logits(logits: &[f32], width: usize) -> (Vec<u32>, Vec<f32>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&z| f64::from(z - max).exp()).sum();
    let log_sum = sum.ln() as f32;
    let log_prob = |id: u32| logits[id as usize] - max - log_sum;
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    // A stable sort keeps the smaller id first among equals.
    ids.sort_by(|&a, &b| log_prob(b).total_cmp(&log_prob(a)));
    ids.truncate(width);
    let log_probs = ids.iter().map(|&id| log_prob(id)).collect();
    (ids, log_probs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(token: u32, parent: u32, depth: u32) -> TreeNode {
        TreeNode {
            token,
            parent,
            depth,
        }
    }

    #[test]
    fn ties_pop_the_smaller_rank_path_first() {
        // Two slots of three equally likely tokens.
        let log_probs = [-1.0; 6];
        let slots = SlotRanks {
            ids: &[7, 8, 9, 4, 5, 6],
            log_probs: &log_probs,
            width: 3,
        };
        // (0), (1), (2) cost 1 each; then (0,0), (0,1), … cost 2.
        let tree = build_tree(slots, 6);
        assert_eq!(
            tree,
            [
                node(7, 0, 1),
                node(8, 0, 1),
                node(9, 0, 1),
                node(4, 1, 2),
                node(5, 1, 2),
                node(6, 1, 2)
            ]
        );
        assert_eq!(build_tree(slots, 100).len(), 3 + 9);
        assert!(build_tree(slots, 0).is_empty());
    }

    #[test]
    fn nodes_are_the_best_paths() {
        // Every prefix-closed set of the most likely paths, against a full enumeration.
        let (depths, width) = (3, 4);
        let log_probs: Vec<f32> = (0..depths)
            .flat_map(|d| {
                (0..width).map(move |r| -0.3 * (r as f32 + 1.0).powf(1.0 + d as f32 * 0.37))
            })
            .collect();
        let ids: Vec<u32> = (0..depths * width).map(|i| i as u32).collect();
        let slots = SlotRanks {
            ids: &ids,
            log_probs: &log_probs,
            width: width as usize,
        };
        let tree = build_tree(slots, 20);
        let cost = |path: &[usize]| -> f64 {
            path.iter()
                .enumerate()
                .map(|(d, &r)| -slots.log_prob(d + 1, r))
                .sum()
        };
        let mut all = Vec::new();
        for a in 0..4 {
            all.push(cost(&[a]));
            for b in 0..4 {
                all.push(cost(&[a, b]));
                for c in 0..4 {
                    all.push(cost(&[a, b, c]));
                }
            }
        }
        all.sort_by(f64::total_cmp);
        let mut costs = vec![0.0];
        for n in &tree {
            let rank = n.token as usize % 4;
            costs.push(costs[n.parent as usize] - slots.log_prob(n.depth as usize, rank));
        }
        for (i, (got, best)) in costs[1..].iter().zip(&all).enumerate() {
            assert!((got - best).abs() < 1e-9, "node {i}: {got} {best}");
        }
    }

    #[test]
    fn the_truth_is_followed_from_the_root() {
        let tree = [
            node(5, 0, 1),
            node(6, 1, 2),
            node(9, 0, 1),
            node(6, 3, 2),
            node(7, 4, 3),
        ];
        assert_eq!(depth_of(&tree, &[9, 6, 7, 1]), 3);
        assert_eq!(depth_of(&tree, &[9, 6]), 2);
        assert_eq!(depth_of(&tree, &[5, 6, 7]), 2);
        assert_eq!(depth_of(&tree, &[6]), 0);
        assert_eq!(depth_of(&tree, &[]), 0);
    }
}
