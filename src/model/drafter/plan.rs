//! What a packed unit asks of the drafter, as index lists: which rows are which positions, which tokens stand
//! in the blocks, which slots are supervised. Pure host work, then one upload.

use super::{DrafterConfig, DrafterError};
use crate::engine::{BlockMask, Engine, EngineError, Index, IndexView, Slots};

/// One document of a unit. All slices have the document's length but `anchors`.
#[derive(Clone, Copy, Debug)]
pub struct Document<'a> {
    /// Token ids `[S]`.
    pub ids: &'a [u32],
    /// Loss mask `[S]`: nonzero where the token is supervised.
    pub mask: &'a [u8],
    /// Anchor positions, ascending, each < S.
    pub anchors: &'a [u32],
}

/// The host's half of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostPlan {
    /// Positions of the context rows.
    pub context_positions: Vec<u32>,
    /// Token ids of the block rows `[blocks * B]`.
    pub block_ids: Vec<u32>,
    /// Positions of the block rows `[blocks * B]`.
    pub block_positions: Vec<u32>,
    /// First context row of each block's document.
    pub context_start: Vec<u32>,
    /// Anchor of each block.
    pub anchor: Vec<u32>,
    /// Row of each supervised slot.
    pub slot_row: Vec<u32>,
    /// Token each supervised slot should predict.
    pub slot_label: Vec<u32>,
    /// Slot number, 1..B.
    pub slot_number: Vec<u32>,
    /// Context row of the teacher's state for the slot, position a + k − 1.
    pub slot_teacher: Vec<u32>,
    /// `[blocks + 1]` first supervised slot of each block.
    pub block_begin: Vec<u32>,
    /// One past the highest position used.
    pub positions: usize,
}

impl HostPlan {
    /// Lays out the blocks of all anchors of `documents`, which are packed in this order.
    ///
    /// # Errors
    /// Documents whose parts do not fit together, ids outside the vocabulary, anchors out of order or range.
    pub fn new(config: &DrafterConfig, documents: &[Document<'_>]) -> Result<Self, DrafterError> {
        let block = config.block_size;
        let mut plan = Self {
            block_begin: vec![0],
            ..Self::default()
        };
        for (number, document) in documents.iter().enumerate() {
            check(config, number, document)?;
            let length = document.ids.len();
            let start = plan.context_positions.len() as u32;
            plan.context_positions.extend(0..length as u32);
            plan.positions = plan.positions.max(length);
            for &anchor in document.anchors {
                let row = plan.block_ids.len() as u32;
                plan.add_block(config, start, anchor, document.ids[anchor as usize]);
                for k in 1..block as u32 {
                    let position = (anchor + k) as usize;
                    if position < length && document.mask[position] != 0 {
                        plan.slot_row.push(row + k);
                        plan.slot_label.push(document.ids[position]);
                        plan.slot_number.push(k);
                        plan.slot_teacher.push(start + anchor + k - 1);
                    }
                }
                plan.block_begin.push(plan.slot_row.len() as u32);
            }
        }
        Ok(plan)
    }

    /// Blocks to decode from: `(first context row, anchor position, anchor id)` each; nothing is supervised.
    pub fn for_decoding(config: &DrafterConfig, blocks: &[(u32, u32, u32)]) -> Self {
        let mut plan = Self {
            block_begin: vec![0; blocks.len() + 1],
            ..Self::default()
        };
        for &(start, anchor, id) in blocks {
            plan.add_block(config, start, anchor, id);
        }
        plan
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.anchor.len()
    }

    /// Number of context rows.
    pub fn tokens(&self) -> usize {
        self.context_positions.len()
    }

    /// Number of supervised slots.
    pub fn slots(&self) -> usize {
        self.slot_row.len()
    }

    fn add_block(&mut self, config: &DrafterConfig, start: u32, anchor: u32, id: u32) {
        let block = config.block_size as u32;
        self.context_start.push(start);
        self.anchor.push(anchor);
        self.block_ids.push(id);
        self.block_ids
            .extend((1..block).map(|_| config.mask_token_id));
        self.block_positions.extend(anchor..anchor + block);
        self.positions = self.positions.max((anchor + block) as usize);
    }
}

fn check(
    config: &DrafterConfig,
    number: usize,
    document: &Document<'_>,
) -> Result<(), DrafterError> {
    let length = document.ids.len();
    let refuse = |expected: String, found: String| {
        Err(DrafterError::Shape {
            what: format!("document {number} of the unit"),
            expected,
            found,
        })
    };
    if document.mask.len() != length {
        return refuse(
            format!("a mask of {length} positions"),
            format!("{} positions", document.mask.len()),
        );
    }
    if let Some(id) = document
        .ids
        .iter()
        .find(|&&id| id as usize >= config.vocab_size)
    {
        return refuse(
            format!("token ids below {}", config.vocab_size),
            format!("id {id}"),
        );
    }
    if document.anchors.windows(2).any(|pair| pair[0] >= pair[1])
        || document
            .anchors
            .last()
            .is_some_and(|&a| a as usize >= length)
    {
        return refuse(
            format!("ascending anchors below {length}"),
            format!("{:?}", document.anchors),
        );
    }
    Ok(())
}

/// A plan whose index lists are on the engine.
pub struct BlockPlan<E: Engine> {
    /// The lists on the host.
    pub host: HostPlan,
    index: Index<E>,
    block: usize,
}

impl<E: Engine> BlockPlan<E> {
    /// Uploads all lists in one copy.
    pub fn upload(engine: &E, config: &DrafterConfig, host: HostPlan) -> Result<Self, EngineError> {
        let mut all = Vec::new();
        for list in lists(&host) {
            all.extend_from_slice(list);
        }
        Ok(Self {
            index: engine.upload_index(&all)?,
            host,
            block: config.block_size,
        })
    }

    /// Positions of the context rows, `[1, tokens]`.
    pub fn context_positions(&self) -> IndexView<'_, E> {
        self.list(0)
    }

    /// Token ids of the block rows, `[1, blocks * B]`.
    pub fn block_ids(&self) -> IndexView<'_, E> {
        self.list(1)
    }

    /// Positions of the block rows, `[1, blocks * B]`.
    pub fn block_positions(&self) -> IndexView<'_, E> {
        self.list(2)
    }

    /// What the blocks see, with the layer's window.
    pub fn mask(&self, window: Option<usize>) -> BlockMask<'_, E> {
        BlockMask {
            block: self.block,
            context_start: self.list(3),
            anchor: self.list(4),
            window,
        }
    }

    /// The supervised slots.
    pub fn slots(&self) -> Slots<'_, E> {
        Slots {
            row: self.list(5),
            label: self.list(6),
            slot: self.list(7),
            teacher_row: self.list(8),
            block_begin: &self.host.block_begin,
        }
    }

    /// Rows of all blocks.
    pub fn rows(&self) -> usize {
        self.host.block_ids.len()
    }

    fn list(&self, which: usize) -> IndexView<'_, E> {
        let lists = lists(&self.host);
        let offset = lists[..which].iter().map(|list| list.len()).sum();
        self.index.window(offset, 1, lists[which].len())
    }
}

/// The lists in the order in which they are uploaded.
fn lists(host: &HostPlan) -> [&[u32]; 9] {
    [
        &host.context_positions,
        &host.block_ids,
        &host.block_positions,
        &host.context_start,
        &host.anchor,
        &host.slot_row,
        &host.slot_label,
        &host.slot_number,
        &host.slot_teacher,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::drafter::config::tests::small_config;

    #[test]
    fn slots_are_the_supervised_labels_inside_the_document() {
        let config = small_config(); // B = 4
        let first = Document {
            ids: &[5, 6, 7],
            mask: &[0, 0, 0],
            anchors: &[],
        };
        let second = Document {
            ids: &[10, 11, 12, 13, 14, 15],
            mask: &[0, 1, 1, 0, 1, 1],
            anchors: &[1, 4],
        };
        let plan = HostPlan::new(&config, &[first, second]).unwrap();
        assert_eq!(plan.context_positions, [0, 1, 2, 0, 1, 2, 3, 4, 5]);
        let mask = config.mask_token_id;
        assert_eq!(plan.block_ids, [11, mask, mask, mask, 14, mask, mask, mask]);
        assert_eq!(plan.block_positions, [1, 2, 3, 4, 4, 5, 6, 7]);
        assert_eq!(plan.context_start, [3, 3]);
        assert_eq!(plan.anchor, [1, 4]);
        assert_eq!(plan.slot_row, [1, 3, 5]);
        assert_eq!(plan.slot_label, [12, 14, 15]);
        assert_eq!(plan.slot_number, [1, 3, 1]);
        assert_eq!(plan.slot_teacher, [4, 6, 7]);
        assert_eq!(plan.block_begin, [0, 2, 3]);
        assert_eq!(plan.positions, 8);
    }

    #[test]
    fn ill_formed_documents_are_refused() {
        let config = small_config();
        let good = Document {
            ids: &[1, 2, 3],
            mask: &[1, 1, 1],
            anchors: &[0, 1],
        };
        assert!(HostPlan::new(&config, &[good]).is_ok());
        for bad in [
            Document {
                mask: &[1, 1],
                ..good
            },
            Document {
                ids: &[1, 2, 1 << 30],
                ..good
            },
            Document {
                anchors: &[1, 0],
                ..good
            },
            Document {
                anchors: &[1, 1],
                ..good
            },
            Document {
                anchors: &[3],
                ..good
            },
        ] {
            assert!(HostPlan::new(&config, &[bad]).is_err(), "{bad:?}");
        }
    }
}
