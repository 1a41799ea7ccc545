//! The rows of a Parquet file, as the JSON text that the same rows would have in a file of JSON lines.
//!
//! Parquet stores columns in groups of rows; rows are put together again one by one (Dremel's record
//! assembly), so that never more than a few pages of each column are in memory.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::reader::{ReaderIter, TreeBuilder};
use parquet::record::{Field, Row};
use parquet::schema::types::{SchemaDescPtr, SchemaDescriptor, Type};
use serde_json::{Map, Value, json};

/// Rows of a column that are decoded at a time.
const DECODED: usize = 64;

/// The rows of one file, in order.
pub(super) struct ParquetRows {
    reader: SerializedFileReader<File>,
    /// The columns that are read; none where no column has a known name.
    columns: Option<SchemaDescPtr>,
    /// The next group of rows to open.
    next_group: usize,
    rows: Option<ReaderIter>,
    done: u64,
}

impl ParquetRows {
    /// Opens a file and looks at its columns; only those that `wanted` accepts are ever decoded.
    pub(super) fn open(path: &Path, wanted: impl Fn(&str) -> bool) -> Result<Self, String> {
        let file = File::open(path).map_err(|e| e.to_string())?;
        let length = file.metadata().map_err(|e| e.to_string())?.len();
        let reader = guarded(|| SerializedFileReader::new(file))?;
        check_ranges(&reader, length)?;
        let root = reader.metadata().file_metadata().schema();
        let fields: Vec<_> = root
            .get_fields()
            .iter()
            .filter(|field| wanted(field.name()))
            .cloned()
            .collect();
        let columns = match fields.is_empty() {
            true => None,
            false => {
                let kept = Type::group_type_builder(root.name()).with_fields(fields);
                let kept = kept.build().map_err(|e| e.to_string())?;
                Some(Arc::new(SchemaDescriptor::new(Arc::new(kept))))
            }
        };
        Ok(Self {
            reader,
            columns,
            next_group: 0,
            rows: None,
            done: 0,
        })
    }

    /// Names of all columns.
    pub(super) fn names(&self) -> Vec<String> {
        let root = self.reader.metadata().file_metadata().schema();
        root.get_fields()
            .iter()
            .map(|field| field.name().to_owned())
            .collect()
    }

    /// The next row as a JSON object, null fields included.
    pub(super) fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        let Some(columns) = self.columns.clone() else {
            return Ok(None);
        };
        loop {
            if let Some(rows) = &mut self.rows {
                match guarded(|| rows.next().transpose())? {
                    Some(row) => {
                        self.done += 1;
                        let text = serde_json::to_vec(&object(row));
                        return Ok(Some(text.expect("a JSON value always has a text")));
                    }
                    None => self.rows = None,
                }
            }
            if self.next_group == self.reader.num_row_groups() {
                return Ok(None);
            }
            let (reader, group) = (&self.reader, self.next_group);
            let rows = guarded(|| {
                let group = reader.get_row_group(group)?;
                TreeBuilder::new()
                    .with_batch_size(DECODED)
                    .as_iter(columns.clone(), &*group)
            })?;
            self.rows = Some(rows);
            self.next_group += 1;
        }
    }

    /// Share of the rows that were read, from 0 to 1.
    pub(super) fn share(&self) -> f64 {
        let rows = self.reader.metadata().file_metadata().num_rows().max(1);
        (self.done as f64 / rows as f64).min(1.0)
    }
}

/// The reader allocates what a file's footer says, and asserts where it meets what it does not expect: neither may
/// take the process down.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    let read = std::panic::AssertUnwindSafe(read);
    match std::panic::catch_unwind(read) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("its pages contradict its footer".to_owned()),
    }
}

fn check_ranges(reader: &SerializedFileReader<File>, length: u64) -> Result<(), String> {
    for group in reader.metadata().row_groups() {
        for column in group.columns() {
            let start = column
                .dictionary_page_offset()
                .unwrap_or_else(|| column.data_page_offset());
            let end = start.checked_add(column.compressed_size());
            let inside = start >= 0
                && column.compressed_size() >= 0
                && end.is_some_and(|end| end as u64 <= length);
            if !inside {
                return Err(format!(
                    "column `{}` lies outside the file of {length} bytes",
                    column.column_path()
                ));
            }
        }
    }
    Ok(())
}

fn object(row: Row) -> Value {
    let fields = row.into_columns().into_iter();
    Value::Object(
        fields
            .map(|(name, field)| (name, value(&field)))
            .collect::<Map<_, _>>(),
    )
}

fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(b) => json!(b),
        Field::Byte(n) => json!(n),
        Field::Short(n) => json!(n),
        Field::Int(n) => json!(n),
        Field::Long(n) => json!(n),
        Field::UByte(n) => json!(n),
        Field::UShort(n) => json!(n),
        Field::UInt(n) => json!(n),
        Field::ULong(n) => json!(n),
        Field::Float16(x) => json!(x.to_f32()),
        Field::Float(x) => json!(x),
        Field::Double(x) => json!(x),
        Field::Str(text) => json!(text),
        // Text written without its logical type.
        Field::Bytes(bytes) => match std::str::from_utf8(bytes.data()) {
            Ok(text) => json!(text),
            Err(_) => json!(format!("({} bytes)", bytes.len())),
        },
        Field::Group(row) => {
            let fields = row.get_column_iter();
            Value::Object(fields.map(|(name, f)| (name.clone(), value(f))).collect())
        }
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => Value::Object(
            map.entries()
                .iter()
                .map(|(key, f)| (key_text(key), value(f)))
                .collect(),
        ),
        // Dates, times and decimals: only their text is of use to a template.
        other => json!(other.to_string()),
    }
}

fn key_text(key: &Field) -> String {
    match key {
        Field::Str(text) => text.clone(),
        other => other.to_string(),
    }
}
