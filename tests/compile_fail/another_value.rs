use std::ops::{Add, Div, Mul, Neg, Sub};

use optimisers::value::Value;

#[derive(Clone, Copy)]
pub struct Mine(f64);

impl Neg for Mine {
    type Output = Mine;

    fn neg(self) -> Mine {
        Mine(-self.0)
    }
}

macro_rules! operations {
    ($($Operation:ident::$name:ident)*) => {$(
        impl $Operation for Mine {
            type Output = Mine;

            fn $name(self, other: Mine) -> Mine {
                Mine(self.0.$name(other.0))
            }
        }

        impl $Operation<f64> for Mine {
            type Output = Mine;

            fn $name(self, other: f64) -> Mine {
                Mine(self.0.$name(other))
            }
        }
    )*};
}

operations!(Add::add Sub::sub Mul::mul Div::div);

impl Value for Mine {
    type Mask = bool;

    fn constant(self, value: f64) -> Mine {
        Mine(value)
    }
    fn sqrt(self) -> Mine {
        Mine(self.0.sqrt())
    }
    fn abs(self) -> Mine {
        Mine(self.0.abs())
    }
    fn lt(self, other: Mine) -> bool {
        self.0 < other.0
    }
    fn le(self, other: Mine) -> bool {
        self.0 <= other.0
    }
    fn equal(self, other: Mine) -> bool {
        self.0 == other.0
    }
    fn select(mask: bool, yes: Mine, no: Mine) -> Mine {
        if mask { yes } else { no }
    }
}
