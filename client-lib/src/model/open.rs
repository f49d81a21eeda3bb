//! A model whose weights can be mapped: one allocation per shard, one mapping per layer, part or tensor.
//!
//! Each allocation starts at the first byte of its shard's tensor data, so that all clients that open a model ask
//! for the same bytes of the same file and share them in VRAM.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use crate::Code;
use crate::allocation::Allocation;
use crate::client::{Client, open_direct};
use crate::error::Error;
use crate::mapping::{MapStats, Mapping};
use crate::plan::{Plan, Step};

use super::{FileIdentity, Layer, ModelError, ModelFiles, Part, Shard, Tensor, TensorSlice};

/// A model that a client has opened. It holds no bytes in VRAM; its mappings do.
#[derive(Debug)]
pub struct Model {
    client: Client,
    files: ModelFiles,
    layers: Vec<Layer>,
    /// One per shard; `None` for a shard without data.
    allocations: Vec<Option<Allocation>>,
}

/// Tensors that are in VRAM until this is dropped.
#[derive(Debug)]
pub struct LayerMapping {
    mapping: Mapping,
    slices: Vec<TensorSlice>,
}

impl Client {
    /// Reads the headers of a model, as [`ModelFiles::open`] does, and opens its shards.
    ///
    /// # Errors
    /// [`Error::Model`] for files that can't be read or are no model; else as [`Client::open_path`].
    pub fn open_model(&self, path: impl AsRef<Path>) -> Result<Model, Error> {
        self.open_model_files(ModelFiles::open(path.as_ref())?)
    }

    /// Opens the shards of a model whose headers have been read.
    ///
    /// # Errors
    /// [`Error::Model`] with [`ModelError::Changed`] for a shard that is no longer the file that was read; else as
    /// [`Client::open_path`].
    pub fn open_model_files(&self, files: ModelFiles) -> Result<Model, Error> {
        let allocations = files
            .shards()
            .iter()
            .map(|shard| self.open_shard(shard))
            .collect::<Result<_, Error>>()?;
        let layers = files.layers();
        Ok(Model { client: self.clone(), files, layers, allocations })
    }

    fn open_shard(&self, shard: &Shard) -> Result<Option<Allocation>, Error> {
        if shard.data_length == 0 {
            return Ok(None);
        }
        let failed = |source| Error::Open { path: shard.path.clone(), source };
        let file = open_direct(&shard.path).map_err(failed)?;
        if FileIdentity::of(&file.metadata().map_err(failed)?) != shard.identity {
            return Err(ModelError::Changed { path: shard.path.clone() }.into());
        }
        self.open_file(&file, shard.data_offset, shard.data_length).map(Some)
    }
}

impl Model {
    /// What is known from its files.
    #[must_use]
    pub fn files(&self) -> &ModelFiles {
        &self.files
    }

    /// Its layers in the order of execution, as [`ModelFiles::layers`] groups them.
    #[must_use]
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Its tensors; layers and parts name them by their index here.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        self.files.tensors()
    }

    /// The allocation of a shard's tensor data; `None` for a shard without data, or if there is no such shard.
    #[must_use]
    pub fn allocation(&self, shard: usize) -> Option<&Allocation> {
        self.allocations.get(shard)?.as_ref()
    }

    /// Brings all tensors of a layer to VRAM, waiting up to `wait` for room.
    ///
    /// # Errors
    /// [`Error::Model`] if there is no such layer; else as [`Client::map`]. A layer larger than the tier is refused:
    /// map its [parts](Layer::parts_of_pages).
    pub fn map_layer(&self, layer: usize, wait: Duration) -> Result<LayerMapping, Error> {
        self.map_slices(self.layer(layer)?.slices().to_vec(), wait)
    }

    /// Brings a part of one of this model's layers to VRAM, waiting up to `wait` for room.
    ///
    /// # Errors
    /// [`Error::Model`] if the part is of another model; else as [`Client::map`].
    pub fn map_part(&self, part: &Part, wait: Duration) -> Result<LayerMapping, Error> {
        self.map_slices(part.slices.clone(), wait)
    }

    /// Brings one tensor to VRAM, waiting up to `wait` for room.
    ///
    /// # Errors
    /// [`Error::Model`] if there is no tensor of that name; else as [`Client::map`].
    pub fn map_tensor(&self, name: &str, wait: Duration) -> Result<LayerMapping, Error> {
        let index = self.files.find(name).ok_or_else(|| self.absent("tensor", name))?;
        let tensor = &self.tensors()[index];
        let (inside, range) = (0..tensor.bytes(), tensor.range.clone());
        let slice = TensorSlice { tensor: index, inside, shard: tensor.shard, range };
        self.map_slices(vec![slice], wait)
    }

    /// Says that a layer will be mapped soon. Returns at once.
    ///
    /// # Errors
    /// [`Error::Model`] if there is no such layer; else as [`Client::prefetch`].
    pub fn prefetch_layer(&self, layer: usize) -> Result<(), Error> {
        self.prefetch(&self.layer(layer)?.ranges)
    }

    /// Says that a part of one of this model's layers will be mapped soon. Returns at once.
    ///
    /// # Errors
    /// [`Error::Model`] if the part is of another model; else as [`Client::prefetch`].
    pub fn prefetch_part(&self, part: &Part) -> Result<(), Error> {
        self.prefetch(&part.ranges)
    }

    /// Declares that this model's layers are going to be mapped in order, once or over and over; see
    /// [`Client::plan`].
    ///
    /// # Errors
    /// As [`Client::plan`].
    pub fn plan(&self, cyclic: bool) -> Result<Plan, Error> {
        self.plan_ranges(self.layers.iter().map(|layer| layer.ranges.as_slice()), cyclic)
    }

    /// The same for parts of layers, in the order given.
    ///
    /// # Errors
    /// [`Error::Model`] if a part is of another model; else as [`Client::plan`].
    pub fn plan_parts<'a>(
        &self,
        parts: impl IntoIterator<Item = &'a Part>,
        cyclic: bool,
    ) -> Result<Plan, Error> {
        self.plan_ranges(parts.into_iter().map(|part| part.ranges.as_slice()), cyclic)
    }

    fn plan_ranges<'a>(
        &self,
        steps: impl Iterator<Item = &'a [(usize, Range<u64>)]>,
        cyclic: bool,
    ) -> Result<Plan, Error> {
        let step = |ranges: &[(usize, Range<u64>)]| -> Result<Step<'_>, Error> {
            let one = |(shard, range): &(usize, Range<u64>)| {
                let (allocation, bytes) = self.in_allocation(*shard, range)?;
                Ok((allocation, bytes, crate::Access::Read))
            };
            ranges.iter().map(one).collect()
        };
        let steps = steps.map(step).collect::<Result<Vec<_>, Error>>()?;
        self.client.plan(&steps, cyclic)
    }

    fn prefetch(&self, ranges: &[(usize, Range<u64>)]) -> Result<(), Error> {
        let ranges = ranges
            .iter()
            .map(|(shard, range)| self.in_allocation(*shard, range))
            .collect::<Result<Vec<_>, Error>>()?;
        self.client.prefetch(&ranges)
    }

    /// Brings some bytes of this model's tensors to VRAM, one range per slice that has any, waiting up to `wait` for
    /// room.
    ///
    /// # Errors
    /// [`Error::Model`] if a slice is of another model; else as [`Client::map`].
    pub fn map_slices(
        &self,
        slices: Vec<TensorSlice>,
        wait: Duration,
    ) -> Result<LayerMapping, Error> {
        // An empty one may lie in a shard without allocation.
        let mut mapped = Vec::with_capacity(slices.len());
        let mut ranges = Vec::with_capacity(slices.len());
        for slice in slices {
            if slice.range.is_empty() {
                continue;
            }
            ranges.push(self.in_allocation(slice.shard, &slice.range)?);
            mapped.push(slice);
        }
        let mapping = self
            .client
            .map(&ranges, crate::Access::Read, wait)
            .map_err(|error| self.name_the_file(error, &mapped))?;
        Ok(LayerMapping { mapping, slices: mapped })
    }

    /// The daemon knows no paths: what it says of a file's bytes lacks which file it is.
    fn name_the_file(&self, error: Error, slices: &[TensorSlice]) -> Error {
        let Error::Refused(mut refused) = error else { return error };
        if matches!(refused.code, Code::FileChanged | Code::FileTruncated | Code::Io) {
            let mut shards: Vec<_> = slices.iter().map(|slice| slice.shard).collect();
            shards.sort_unstable();
            shards.dedup();
            let path = |shard: usize| self.files.shards()[shard].path.display().to_string();
            let paths: Vec<_> = shards.into_iter().map(path).collect();
            refused.message = format!("{}: {}", paths.join(" or "), refused.message);
        }
        Error::Refused(refused)
    }

    /// Bytes of a shard's file as bytes of its allocation.
    fn in_allocation(
        &self,
        shard: usize,
        range: &Range<u64>,
    ) -> Result<(&Allocation, Range<u64>), Error> {
        let absent = || self.absent("shard with these bytes", &shard.to_string());
        let allocation = self.allocation(shard).ok_or_else(absent)?;
        let offset = self.files.shards()[shard].data_offset;
        let start = range.start.checked_sub(offset).ok_or_else(absent)?;
        let end = range.end.checked_sub(offset).ok_or_else(absent)?;
        Ok((allocation, start..end))
    }

    fn layer(&self, layer: usize) -> Result<&Layer, Error> {
        self.layers.get(layer).ok_or_else(|| self.absent("layer", &layer.to_string()))
    }

    fn absent(&self, what: &'static str, name: &str) -> Error {
        let path = self.files.shards().first().map(|shard| shard.path.clone()).unwrap_or_default();
        ModelError::Absent { path, what, name: name.to_owned() }.into()
    }
}

impl LayerMapping {
    /// The bytes of a tensor, by its index in the model; in a part that cuts the tensor, those of the part. `None`
    /// for a tensor that is not mapped here; empty tensors never are. `None` as well on a CUDA device, where the CPU
    /// can't reach them: see [`Self::tensor_device_ptr`] and [`Self::copy_to_host`].
    #[must_use]
    pub fn tensor(&self, tensor: usize) -> Option<&[u8]> {
        self.position(tensor).and_then(|range| self.mapping.try_bytes(range).ok())
    }

    /// The address of a tensor: the same for every mapping of it while its [`Model`] lives, to be touched only while
    /// a mapping does. On a CUDA device it is the device's, and nothing for the CPU to touch.
    #[must_use]
    pub fn tensor_ptr(&self, tensor: usize) -> Option<*const u8> {
        self.position(tensor).map(|range| self.mapping.as_ptr(range).cast_const())
    }

    /// The device address of a tensor, for kernels; `None` for a tensor that is not mapped here, and where the device
    /// isn't a CUDA device.
    #[must_use]
    pub fn tensor_device_ptr(&self, tensor: usize) -> Option<u64> {
        self.position(tensor).and_then(|range| self.mapping.device_ptr(range))
    }

    /// All that is mapped here. Empty tensors are left out.
    #[must_use]
    pub fn slices(&self) -> &[TensorSlice] {
        &self.slices
    }

    /// All that is mapped here, with its bytes. Empty tensors are left out. On a CUDA device the bytes are empty
    /// slices, for the CPU can't reach them: [`Self::copy_to_host`] reads them on any device.
    pub fn iter(&self) -> impl Iterator<Item = (&TensorSlice, &[u8])> {
        self.slices.iter().enumerate().map(|(range, slice)| (slice, self.mapping.bytes(range)))
    }

    /// Copies bytes of one of [`Self::slices`], by its index there, from the slice's byte `offset` on, as many as
    /// `target` takes, on any device.
    ///
    /// # Errors
    /// As [`Mapping::copy_to_host`].
    ///
    /// # Panics
    /// If there is no such slice.
    pub fn copy_to_host(&self, slice: usize, offset: u64, target: &mut [u8]) -> Result<(), Error> {
        self.mapping.copy_to_host(slice, offset, target)
    }

    /// What it cost.
    #[must_use]
    pub fn stats(&self) -> MapStats {
        self.mapping.stats()
    }

    /// The mapping itself, and what each of its ranges holds: [`Self::slices`].
    #[must_use]
    pub fn into_parts(self) -> (Mapping, Vec<TensorSlice>) {
        (self.mapping, self.slices)
    }

    /// Ends the mapping and waits until the daemon has taken note. Dropping it does the same without waiting.
    ///
    /// # Errors
    /// As [`Mapping::unmap`].
    pub fn unmap(self) -> Result<(), Error> {
        self.mapping.unmap()
    }

    /// Ends the mapping once the GPU has done what `stream` holds now, and returns at once; see
    /// [`Mapping::unmap_after`].
    ///
    /// # Errors
    /// As [`Mapping::unmap_after`].
    ///
    /// # Safety
    /// As [`Mapping::unmap_after`].
    #[expect(unsafe_code, reason = "passes the caller's promise on")]
    pub unsafe fn unmap_after(self, stream: *mut std::ffi::c_void) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.mapping.unmap_after(stream) }
    }

    fn position(&self, tensor: usize) -> Option<usize> {
        self.slices.iter().position(|slice| slice.tensor == tensor)
    }
}

#[cfg(test)]
mod tests;
