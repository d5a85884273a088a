//! [`Model`] for the standard library's containers. Paths are indices in lists and tuples, and keys in maps.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::sync::Arc;

use super::{Model, Visitor};

macro_rules! pointers {
    ($($Pointer:ty),*) => {$(
        impl<M: Model + ?Sized> Model for $Pointer {
            fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
                (**self).visit(visitor);
            }
        }
    )*};
}

pointers!(&M, &mut M, Box<M>, Rc<M>, Arc<M>);

impl<M: Model> Model for Option<M> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        if let Some(model) = self {
            model.visit(visitor);
        }
    }
}

impl<M: Model> Model for [M] {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (i, model) in self.iter().enumerate() {
            visitor.child(&i.to_string(), model);
        }
    }
}

impl<M: Model> Model for Vec<M> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.as_slice().visit(visitor);
    }
}

impl<M: Model, const N: usize> Model for [M; N] {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        self.as_slice().visit(visitor);
    }
}

impl<K: AsRef<str>, M: Model, S> Model for HashMap<K, M, S> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (name, model) in self {
            visitor.child(name.as_ref(), model);
        }
    }
}

impl<K: AsRef<str>, M: Model> Model for BTreeMap<K, M> {
    fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
        for (name, model) in self {
            visitor.child(name.as_ref(), model);
        }
    }
}

macro_rules! tuples {
    ($(($($Part:ident $index:tt),+))*) => {$(
        impl<$($Part: Model),+> Model for ($($Part,)+) {
            fn visit<'m>(&'m self, visitor: &mut Visitor<'m, '_>) {
                $(visitor.child(stringify!($index), &self.$index);)+
            }
        }
    )*};
}

tuples! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
}
