//! Paged attention for CPUs, which reads keys and values where they lie in the pool, through block tables and strides; and linear
//! layers, which read weights where torch keeps them; and where the memory of a library comes from.
//!
//! Always: a cached row that a query does not see never matters, whatever it holds, and a row that no query of its sequence sees is
//! never read; sums are in float32; what is answered for a sequence depends neither on the rest of the batch nor on the number of
//! threads.
//!
//! Every call checks everything it is given before anything is read or written. `unsafe` code lives in this crate, and in the
//! buffers of `rust/py`, each use with its reason; what cannot be checked here is the promise of [`Tensor::new`].

#![warn(clippy::undocumented_unsafe_blocks)]
// Loops over registers read best with their index, and kernels take what they take.
#![allow(clippy::needless_range_loop, clippy::too_many_arguments)]

mod allocator;
mod around_attention;
mod attention;
mod chunk;
mod decode;
mod decoder_layers;
mod element;
mod input;
mod isa;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod lanes_avx2;
#[cfg(target_arch = "x86_64")]
mod lanes_avx512;
mod lanes_portable;
mod layer;
mod left;
mod linear;
pub mod mutant;
mod product;
mod scratch;
mod softmax;
mod store;
mod strips;
mod team;
mod tensor;
#[cfg(target_arch = "x86_64")]
mod thirds;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub use allocator::{Allocator, allocations};
pub use around_attention::{AfterAttention, BeforeAttention, Norm, after_attention, before_attention};
pub use attention::{Attention, attend};
pub use decoder_layers::{DecoderLayer, DecoderLayers, Step, decoder_layers};
pub use input::Refusal;
pub use isa::Isa;
pub use linear::{Activation, Gated, Linear, gated, linear};
pub use store::store_kv;
pub use team::read_sum;
pub use tensor::{Dtype, Tensor};
